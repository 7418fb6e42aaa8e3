"""Our shared_fs tier alone, as `drive_nvme` drives the other."""

from drive_nvme import VERSIONS, Ours


class SharedFS(Ours):
    """A cache of one shared directory."""

    medium = "shared_fs"


TIER = SharedFS
__all__ = ["TIER", "VERSIONS"]
