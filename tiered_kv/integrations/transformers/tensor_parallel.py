"""The processes of a tensor parallel model: each stores and loads its heads, and all go on at one place."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import distributed
from transformers import PreTrainedModel

from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.integers import Mask
from tiered_kv.values.keys import Shard


@dataclass(frozen=True)
class Ranks:
    """All processes of a model, as one of them sees them.

    Attributes:
        shard: Its part of each block.
        group: Of processes, by which they agree; None where there is one alone.
        device: On which they do.
    """

    shard: Shard
    group: Any = None
    device: torch.device | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """Read the ranks off a model.

        Raises:
            ConfigurationError: It is spread over processes otherwise than by tensor parallelism.
        """
        mesh: Any = getattr(model, "_device_mesh", None)
        if mesh is None or mesh.size() == 1:
            return cls(Shard())
        ranks = mesh["tp"] if "tp" in (mesh.mesh_dim_names or ()) else mesh
        if ranks.size() < mesh.size():
            raise ConfigurationError(
                f"a model is served whose {mesh.size()} processes are all tensor parallel, of these {ranks.size()} are"
            )
        return cls(Shard(ranks.get_local_rank(), ranks.size()), ranks.get_group(), model.device)

    @contextmanager
    def before_agreeing(self, there: list[list[Mask]]) -> Iterator[None]:
        """Do what may raise on this rank alone: then it has nothing, and the others, which wait in `agree`, hear so.

        Args:
            there: As they give it to `agree`; only its lengths count.
        """
        try:
            yield
        except Exception:
            self.agree([[np.zeros(len(mask), np.bool_) for mask in of_row] for of_row in there])
            raise

    def agree(self, there: list[list[Mask]]) -> list[list[Mask]]:
        """Return for each row and part which blocks are there for all ranks, which call this together."""
        if self.group is None:
            return there
        masks = [mask for of_row in there for mask in of_row]
        everywhere = torch.from_numpy(np.concatenate(masks)).to(self.device, torch.int32)
        distributed.all_reduce(everywhere, distributed.ReduceOp.MIN, group=self.group)
        agreed = iter(np.split(everywhere.cpu().numpy() > 0, np.cumsum([len(mask) for mask in masks])[:-1]))
        return [[next(agreed) for _ in of_row] for of_row in there]
