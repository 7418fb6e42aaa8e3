"""Fields of engines' configurations that are in no model's name, by why: with those that are, all that there are.

A field that a new version brings is in neither until somebody has read what it does to the KV of a token, and to what a
block's hash means. Kernels that compute the same are accepted, in whatever order they add and wherever they round:
engines choose them by the hardware, and prefill and decode of one model often have different ones.
"""

from typing import Final

Judged = dict[str, dict[str, str]]
"""Of each class why fields of it change no name, and which."""

_NAMED = "is in a field that is named by then"
_KERNELS = "which kernels compute it, and how they are prepared"
_TOKENS = "which tokens a prompt is: these are in the hashes"
_BEHIND = "what is made of KV: tokens, vectors and what is told of them"
_SPEED = "when and where something is computed, and how much memory that has"
_PAGES = "is told by pages, block sizes, ranks and hashes"
_REFUSED = "is not served with: refused, or blocks of no kind that is"
_DRAFTS = "what is drafted: another draft costs its tokens time, and which one it is is named"

VLLM: Final[Judged] = {
    "vllm.VllmConfig": {
        _NAMED: "quant_config",
        _KERNELS: "kernel_config compilation_config mamba_config additional_config optimization_level performance_mode",
        _BEHIND: "watermark_config structured_outputs_config reasoning_config aux_output_config diffusion_config",
        _SPEED: """scheduler_config device_config offload_config engram_config observability_config logging_config
            profiler_config kv_transfer_config kv_events_config ec_transfer_config ec_manager_config instance_id
            weight_transfer_config watchdog_config shutdown_timeout""",
        _PAGES: "parallel_config",
    },
    "model.ModelConfig": {
        _NAMED: """hf_text_config hf_config_path config_format hf_overrides generation_config is_submodel_config
            disable_sliding_window word_embeddings_untied_by_checkpoint allow_deprecated_quantization
            language_model_only limit_mm_per_prompt enable_mm_embeds media_io_kwargs mm_processor_kwargs
            mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb
            mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype
            mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin
            interleave_mm_strings skip_mm_profiling video_pruning_rate video_pruning_method mm_tensor_ipc
            mm_ipc_gpu_memory_gb mm_device_do_normalize mm_processor_device""",
        _KERNELS: "enforce_eager disable_cascade_attn",
        _TOKENS: """tokenizer_mode skip_tokenizer_init enable_prompt_embeds io_processor_plugin
            allowed_local_media_path allowed_media_domains""",
        _BEHIND: """runner convert pooler_config seed return_sampling_mask max_logprobs logprobs_mode
            use_fp64_gumbel enable_trace_replay logits_processors served_model_name""",
        _SPEED: """renderer_num_workers hf_token enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend
            sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator""",
        _REFUSED: "model_weights",  # of object storage a folder without weights is left
        _DRAFTS: "spec_target_max_model_len",
    },
    "cache.CacheConfig": {
        _NAMED: "sliding_window is_attention_free",
        _PAGES: """DEFAULT_BLOCK_SIZE block_size user_specified_block_size _block_size_resolved kv_cache_layout
            prefix_match_unit prefix_caching_hash_algo mamba_block_size mamba_page_size_padded skip_page_size_padded
            use_replayssm replayssm_buffer_len use_kda_recoverssm effective_attention_block_size hash_block_size
            cache_hit_alignment_tokens""",
        _SPEED: """gpu_memory_utilization num_gpu_blocks_override enable_prefix_caching kv_cache_memory_bytes
            prefix_cache_retention_interval enable_mamba_shared_prefix_checkpoint num_gpu_blocks num_cpu_blocks
            simple_cpu_offload_num_blocks kv_cache_size_tokens kv_cache_max_concurrency kv_offloading_size
            kv_offloading_backend""",
        "leaves out what has no KV of its own": "kv_sharing_fast_prefill",
        _REFUSED: "mamba_cache_mode swa_bounded_replay",
    },
    "load.LoadConfig": {
        "is for the hub, of which a revision is a commit by then": "download_dir ignore_patterns",
        _SPEED: """safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size device
            use_tqdm_on_load pt_load_map_location""",
    },
    "lora.LoRAConfig": {
        _KERNELS: "fully_sharded_loras specialize_active_lora",
        _SPEED: "max_loras max_cpu_loras",
        "an adapter of a higher rank is refused": "max_lora_rank",
        "is in a request, and its adapter in names of blocks": "default_mm_loras",
        "is in hashes of images": "enable_tower_connector_lora",
        _BEHIND: "max_lora_cls_labels",
    },
    "multimodal.MultiModalConfig": {
        _KERNELS: "mm_device_do_normalize mm_encoder_tp_mode mm_encoder_attn_backend",
        _TOKENS: "limit_per_prompt mm_hasher_algorithm interleave_mm_strings allow_missing_mm_embeddings",
        _SPEED: """mm_processor_cache_type mm_shm_cache_max_object_size_mb skip_mm_profiling mm_tensor_ipc
            mm_ipc_gpu_memory_gb mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin""",
        "has no KV": "mm_encoder_only",
    },
    "attention.AttentionConfig": {
        _KERNELS: """backend backend_per_kind minimax_m3_msa_decode_backend flash_attn_version
            flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph
            use_trtllm_attention mla_prefill_backend trtllm_ragged_backend indexer_sparse_logits
            indexer_tp_shard_min_rows minimax_m3_indexer_cp use_non_causal sparse_mla_force_mqa
            sparse_mla_prefill_workspace_factor flex_attn_block_m flex_attn_block_n flex_attn_q_block_size
            flex_attn_kv_block_size""",
        _PAGES: "indexer_kv_dtype",
        _REFUSED: "hisparse_config",
    },
    "speculative.SpeculativeConfig": {
        _DRAFTS: """num_speculative_tokens model method quantization revision code_revision moe_backend
            attention_backend enforce_eager max_model_len index_share_for_mtp_iteration disable_padded_drafter_batch
            disable_eagle_block_drop use_local_argmax_reduction use_heterogeneous_vocab draft_lm_head_quantization
            prompt_lookup_max prompt_lookup_min parallel_drafting num_speculative_tokens_per_batch_size
            suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor
            suffix_decoding_min_token_prob draft_load_config draft_sample_method dspark_draft_topk xpress_topc""",
        _BEHIND: """rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length
            enable_adaptive_verification fly_window_size fly_entropy_threshold fly_entropy_top_k""",
        # A hash that covers tokens behind its block is of other text than one that does not.
        _PAGES: """kv_cache_dtype draft_tensor_parallel_size tensor_parallel_size draft_parallel_config
            target_parallel_config disable_lookahead_block_hashes""",
        _NAMED: "target_model_config",
    },
    "kernel.KernelConfig": {
        _KERNELS: """ir_op_priority enable_flashinfer_autotune enable_rocm_segmented_attn_autotune
            enable_cutedsl_warmup enable_jit_warmup moe_backend sparse_indexer_topk_backend linear_backend
            linear_backend_per_quant monokernel""",
    },
    "mamba.MambaConfig": {
        _KERNELS: "backend enable_stochastic_rounding stochastic_rounding_philox_rounds ssu_algorithm",
    },
    "diffusion.DiffusionConfig": {
        "is of a canvas: what is committed is computed anew, by tokens before it": "canvas_length max_denoising_steps",
    },
    "compilation.CompilationConfig": {
        _KERNELS: """mode debug_dump_path cache_dir compile_cache_save_format backend custom_ops
            ir_enable_torch_wrap splitting_ops compile_mm_encoder cudagraph_mm_encoder
            encoder_cudagraph_token_budgets encoder_cudagraph_max_vision_items_per_batch
            encoder_cudagraph_max_frames_per_batch cudagraph_decoder_replay decoder_replay_cudagraph_capture_sizes
            decoder_replay_trim_threshold compile_sizes compile_ranges_endpoints inductor_compile_config
            inductor_passes cudagraph_mode cudagraph_num_of_warmups cudagraph_capture_sizes cudagraph_copy_inputs
            cudagraph_specialize_lora use_inductor_graph_partition pass_config max_cudagraph_capture_size
            dynamic_shapes_config local_cache_dir fast_moe_cold_start enabled_custom_ops disabled_custom_ops
            traced_files compilation_time encoder_compilation_time static_forward_context static_all_moe_layers
            _attention_ops""",
    },
    "parallel.ParallelConfig": {
        _PAGES: "pipeline_parallel_size tensor_parallel_size world_size rank data_parallel_index is_moe_model",
        _REFUSED: """prefill_context_parallel_size decode_context_parallel_size dcp_kv_cache_interleave_size
            cp_kv_cache_interleave_size dcp_comm_backend dcp_q_replicate _allow_auto_resolve_cp_interleave_size""",
        _KERNELS: """enable_hc_sp enable_expert_parallel enable_batch_sharded_sampling enable_ep_weight_filter
            enable_eplb eplb_config expert_placement_strategy all2all_backend disable_custom_all_reduce enable_dbo
            ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold""",
        _SPEED: """data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_rank_local
            data_parallel_master_ip data_parallel_rpc_port dp_sync_interval data_parallel_master_port
            data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb max_parallel_loading_workers
            enable_shm_tensor_arena enable_elastic_ep elastic_ep_max_dp_size disable_nccl_for_dp_synchronization
            ray_workers_use_nsight ray_runtime_env placement_group distributed_executor_backend worker_cls
            worker_extension_cls master_addr master_port node_rank nnodes numa_bind numa_bind_nodes numa_bind_cpus
            assigned_physical_gpu_ids distributed_timeout_seconds cpu_distributed_timeout_seconds
            _data_parallel_master_port_list _coord_store_port _api_process_count _api_process_rank
            enable_fault_tolerance fault_tolerance_config""",
    },
}
"""Of vLLM 0.32 and 0.33. What classes have that are not here is judged by the field of `VllmConfig`."""

SGLANG: Final[Judged] = {
    "device.Device": {_SPEED: "*"},
    "disagg.Disagg": {_SPEED: "*"},
    "exec_.ExecGraph": {_KERNELS: "*"},
    "exec_.ExecOverlap": {_SPEED: "*"},
    "exec_.ExecOffload": {_SPEED: "*"},
    "memory.Memory": {_SPEED: "*"},
    "observability.Observability": {_BEHIND: "*"},
    "schedule.Schedule": {_SPEED: "*"},
    "serving.Serving": {_TOKENS: "*"},
    "exec_.ExecDllm": {_REFUSED: "dllm_algorithm dllm_algorithm_config dllm_fdfo"},
    "exec_.ExecDeterministic": {_KERNELS: "enable_deterministic_inference rl_on_policy_target"},
    "exec_.ExecFeatures": {
        _BEHIND: """enable_fp32_lm_head enable_custom_logit_processor enable_watermark watermark_config
            watermark_key watermark_key_b watermark_context_window watermark_mixing_probability
            watermark_max_probability watermark_default_enabled watermark_enforce_all enable_return_hidden_states
            return_hidden_states_mode enable_return_aux_hidden_states aux_hidden_state_capture
            return_aux_hidden_state_layer_ids enable_return_routed_experts enable_return_indexer_topk
            sampling_mask_max_tokens""",
        _KERNELS: "enable_tf32_matmul",
        _SPEED: """enable_memory_saver enable_weights_cpu_backup enable_draft_weights_cpu_backup
            disable_outlines_disk_cache""",
        _REFUSED: "enable_mis",
    },
    "exec_.ExecKernel": {
        _KERNELS: """attention_backend decode_attention_backend enable_lean_attention enable_nvidia_megakernel
            enable_amd_monokernel prefill_attention_backend prefill_kv_cache_dequant_dtype fp8_gemm_runner_backend
            fp4_gemm_runner_backend bf16_gemm_backend dsa_prefill_backend dsv4_prefill_backend dsa_triton_union
            dsa_decode_backend dsv4_attn_backend dsa_paged_mqa_logits_backend dsa_topk_backend
            disable_flashinfer_autotune flashinfer_autotune_skip_ops triton_attention_reduce_in_fp32
            triton_attention_num_kv_splits triton_attention_split_tile_size flashinfer_mla_disable_ragged
            enable_fused_qk_norm_rope enable_dsa_fused_indexer""",
        _BEHIND: "sampling_backend grammar_backend",
        _PAGES: "enable_deepseek_v4_fp4_indexer",
    },
    "exec_.ExecMamba": {
        _KERNELS: """mamba_backend enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds
            linear_attn_backend linear_attn_decode_backend linear_attn_prefill_backend linear_attn_verify_backend""",
        _PAGES: """mamba_ssm_dtype enable_int8_mamba_checkpoint enable_linear_replayssm linear_replayssm_cache_len
            enable_linear_replayssm_spec""",
        _SPEED: """mamba_max_states_per_path mamba_radix_cache_strategy uses_mamba_radix_cache mamba_track_interval
            int8_mamba_ckpt_size""",
    },
    "exec_.ExecComm": {
        _KERNELS: """enable_nccl_nvls enable_symm_mem disable_custom_all_reduce enable_mscclpp enable_torch_symm_mem
            enable_scattered_sconv pre_warm_nccl boundary_reduction enable_flashinfer_allreduce_fusion
            enforce_disable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend
            enable_aiter_allreduce_fusion disable_aiter_allreduce_fusion_in_prefill
            disable_aiter_allreduce_fusion_in_decode""",
        _BEHIND: "enable_layerwise_nvtx_marker",
    },
    "exec_.ExecMoe": {
        _KERNELS: """enable_fused_moe_sum_all_reduce moe_a2a_backend deepep_v2_mode moe_runner_backend deepep_mode
            fuseep_mode ep_num_redundant_experts ep_dispatch_algorithm init_expert_location enable_eplb
            eplb_algorithm eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk
            eplb_min_rebalancing_utilization_threshold deepep_config enable_waterfill
            disable_flashinfer_cutlass_moe_fp4_allgather disable_shared_experts_fusion enforce_shared_experts_fusion""",
        _SPEED: """expert_distribution_recorder_mode expert_distribution_recorder_buffer_size
            expert_balancedness_report_mode elastic_ep_backend enable_elastic_expert_backup mooncake_ib_device
            ep_join_mode elastic_ep_scale_timeout enable_paged_experts paged_experts_num_resident kt_cpuinfer
            kt_threadpool_count""",
    },
    "lora.Lora": {
        _KERNELS: "lora_backend max_lora_chunk_size lora_use_virtual_experts",
        _SPEED: """enable_lora_overlap_loading max_loaded_loras max_loras_per_batch lora_eviction_policy
            lora_drain_wait_threshold""",
        "an adapter that does not fit is refused": "max_lora_rank lora_strict_loading",
    },
    "mm.Mm": {
        "is in hashes of images: these are of what was prepared": """enable_multimodal mm_process_config
            image_processor_backend disable_fast_image_processor limit_mm_data_per_request trust_mm_content_hashes
            mm_preprocess_cache_size_mb allowed_media_domains media_url_max_file_size_mb""",
        _KERNELS: "mm_attention_backend mm_enable_dp_encoder",
        _SPEED: """enable_broadcast_mm_inputs_process enable_prefix_mm_cache mm_processor_worker_num
            mm_io_worker_num enable_mm_global_cache mm_global_cache_backend mm_feature_transport""",
    },
    "model.Model": {
        "is longer than a prompt's positions are: no frequency is taken by it": "context_length",
        _BEHIND: "is_embedding",
        _PAGES: "qsa_indexer_dtype",
        _SPEED: """modelopt_checkpoint_save_path modelopt_export_path startup_weight_load_mode
            weight_loader_disable_mmap weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads
            weight_loader_drop_cache_after_load engine_info_bootstrap_port model_checksum delete_ckpt_after_loading
            weight_cache_socket weight_cache_timeout""",
        "is of weights that must be named: of another place, or updated": """custom_weight_loader
            modelexpress_config remote_instance_weight_loader_seed_instance_ip
            remote_instance_weight_loader_seed_instance_service_port
            remote_instance_weight_loader_send_weights_group_ports remote_instance_weight_loader_backend
            remote_instance_weight_loader_start_seed_via_transfer_engine checkpoint_engine_wait_weights_before_ready""",
        _DRAFTS: "decrypted_draft_config_file",
    },
    "parallel.Parallel": {
        _PAGES: "tp_size pp_size attn_cp_size enable_dsa_cache_layer_split",
        _REFUSED: "dcp_size dcp_comm_backend dcp_replicate_q_proj enable_kv_cache_sharding",
        _KERNELS: """enable_prefill_cp cp_strategy enable_cp_tp_group_sharing enable_cp_decode_attn_tp
            enable_dp_attention enable_dp_attention_local_control_broadcast enable_dp_lm_head
            enable_tp_lm_head_all_to_all enable_attn_tp_input_scattered enable_shared_experts_attn_tp
            shared_experts_tp_size enable_dense_mlp_attn_tp enable_layernorm_sp enable_megamoe_for_layernorm_sp
            disable_attn_tp_gather moe_dp_size dwdp_size ep_size moe_dense_tp_size""",
        _SPEED: """nccl_port dist_timeout dist_init_addr gated_launch_port nnodes node_rank pp_max_micro_batch_size
            pp_async_batch_depth dp_size attn_dp_size load_balance_method enable_p2p_check ep_join_rank_offset
            elastic_ep_initial_size max_ep_size""",
    },
    "spec.Spec": {
        _DRAFTS: """speculative_algorithm speculative_boundary_reduction speculative_draft_load_format
            speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens speculative_dflash_block_size
            speculative_domino_candidate_pool_size speculative_dspark_block_size speculative_dspark_sps_table_path
            speculative_dspark_confidence_sts_path speculative_dspark_align_verify_tokens_to_graph_tier
            speculative_token_map speculative_draft_attention_backend speculative_dsa_topk_backend
            speculative_draft_window_size speculative_draft_sink_size speculative_moe_runner_backend
            speculative_moe_a2a_backend speculative_enable_w4a4_mxfp4_megamoe
            _speculative_draft_quantization_explicitly_set enable_multi_layer_eagle speculative_adaptive
            speculative_adaptive_config speculative_ngram_min_bfs_breadth speculative_ngram_max_bfs_breadth
            speculative_ngram_match_type speculative_ngram_max_trie_depth speculative_ngram_capacity
            speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget
            speculative_ngram_external_corpus_max_tokens""",
        _BEHIND: """speculative_accept_threshold_single speculative_accept_threshold_acc
            speculative_use_rejection_sampling speculative_use_block_verification spec_trace_dir""",
        _KERNELS: "speculative_attention_mode",
        _PAGES: "speculative_draft_kv_cache_dtype",
    },
}
"""Of SGLang 0.5.23, by the namespaces of its arguments; ``*``: all that is in one, whatever a new version brings."""
