"""Megatron's arguments that make no difference to PACI, by topic, names as in parsed arguments.

None of them touches the schedule, the optimizer step, the communication of gradients and weights, a
collective over stages while training runs, or what a layer keeps between forward and backward.
Those that do are judged by rules (rules.py, refused.py) or listed in features.py and unproved.py.
An argument of a newer Megatron that is in none of these is refused when it is used
(compatibility.py).
"""

MEGATRON_VERSION = "0.19.2"
"""The version of Megatron-Core whose arguments these are."""

MODEL_SHAPE = """
    num_layers encoder_num_layers decoder_num_layers hidden_size num_attention_heads
    num_query_groups group_query_attention ffn_hidden_size kv_channels softmax_type window_size
    window_attn_skip_freq hidden_dropout attention_dropout fp32_residual_connection
    apply_residual_connection_post_layernorm layernorm_epsilon layernorm_zero_centered_gamma
    add_bias_linear add_qkv_bias glu_linear_offset activation_func_clamp_value normalization
    qk_layernorm qk_l2_norm attention_output_gate multi_latent_attention q_lora_rank kv_lora_rank
    qk_head_dim qk_pos_emb_head_dim v_head_dim mscale mscale_all_dim linear_attention_freq
    linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads
    linear_num_value_heads openai_gelu squared_relu swiglu quick_geglu onnx_safe bert_binary_head
    max_position_embeddings position_embedding_type add_position_embedding
    relative_attention_num_buckets relative_attention_max_distance use_rotary_position_embeddings
    rotary_base rotary_percent rotary_interleaved rotary_scaling_factor
    rotary_seq_len_interpolation_factor use_rope_scaling rope_scaling_factor rope_type no_rope_freq
    mrope_section yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow
    yarn_correction_range_round_to_int make_vocab_size_divisible_by apply_query_key_layer_scaling
    attention_softmax_in_fp32 fp16_lm_cross_entropy disable_bf16_reduced_precision_matmul
    clone_scatter_output_in_embedding mlp_chunks_for_training heterogeneous_layers_config_path
    heterogeneous_layers_config_encoded_json spec mamba_state_dim mamba_head_dim mamba_num_groups
    mamba_num_heads mamba_training_ssm_states_dtype dsa_indexer_n_heads dsa_indexer_head_dim
    dsa_indexer_topk dsa_indexer_topk_freq dsa_indexer_skip_topk_offset
    dsa_indexer_use_sparse_loss dsa_indexer_rope_interleaved dsa_indexer_rotate_activation
    dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32
"""

EXPERTS = """
    moe_layer_freq moe_use_upcycling moe_upcycling_granularity moe_aux_loss_coeff
    moe_shared_expert_intermediate_size moe_shared_expert_gate use_grouped_gemm_for_shared_expert
    moe_shared_expert_glu_interleave_size moe_ffn_hidden_size moe_router_topk
    moe_router_padding_for_quantization moe_router_padding_for_fp8 moe_router_num_groups
    moe_router_group_topk moe_router_pre_softmax moe_router_topk_scaling_factor
    moe_router_score_function moe_router_dtype
    moe_router_bias_update_rate moe_router_quantile_balancing_ema
    moe_router_force_load_balancing moe_router_force_biased use_grouped_gemm_for_dense_mlp
    moe_single_grouped_weight moe_single_grouped_bias moe_z_loss_coeff moe_input_jitter_eps
    moe_flex_dispatcher_backend moe_permute_fusion_into_hybridep
    moe_hybridep_pad_uneven_dispatch_inputs moe_expert_capacity_factor
    moe_pad_expert_input_to_capacity moe_token_drop_policy moe_layer_recompute
    moe_apply_probs_on_input moe_latent_size moe_flex_dispatcher_num_sms moe_deepep_num_sms
    moe_hybridep_num_sms moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute
    moe_hybridep_num_sms_preprocessing moe_ncclep_static_shape moe_ncclep_zero_copy
    moe_mlp_glu_interleave_size
"""

INITIALIZATION = """
    seed perform_initialization use_cpu_initialization init_model_with_meta_device init_method_std
    embedding_init_method_std init_method_xavier_uniform data_parallel_random_init
    mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim
    mup_attn_scale_power deterministic_mode inference_rng_tracker dump_param_to_param_group_map
    enable_experimental config_logger_dir
"""

LAUNCH = """
    local_rank lazy_mpu_init distributed_timeout_minutes use_gloo_process_groups
    flight_recorder_dump_path flight_recorder_trace_buffer_size flight_recorder_dump_on_timeout
    flight_recorder_include_stack_trace flight_recorder_include_only_active
    flight_recorder_extra_dump_on_exec enable_msc disable_msc_deprecated
    run_workload_inspector_server
"""

DATA = """
    data_path split train_data_path valid_data_path test_data_path data_args_path
    per_split_data_args_path per_dataset_sequences_path dataloader_type dataloader_fast_cache_load
    dataloader_defer_npy_index_mmap data_cache_path mmap_bin_files mock_data seq_length
    encoder_seq_length decoder_seq_length sample_rate mask_prob short_seq_prob num_workers
    reset_position_ids reset_attention_mask eod_mask_loss create_attention_mask_in_dataloader
    num_dataset_builder_threads object_storage_cache_path mid_level_dataset_surplus
    allow_ambiguous_pad_tokens exit_signal_handler_for_dataloader fim_data fim_rate fim_spm_rate
    fim_split_sample fim_fragment_rate fim_no_prefix fim_prefix_token fim_middle_token
    fim_suffix_token fim_pad_token fim_eod_token
"""

TOKENIZER = """
    vocab_size padded_vocab_size pad_vocab_size vocab_file merge_file vocab_extra_ids
    tokenizer_type tokenizer_model metadata_path special_tokens tiktoken_pattern
    tiktoken_num_special_tokens tokenizer_sentencepiece_legacy
    tokenizer_sentencepiece_ignore_extra_whitespaces tokenizer_hf_no_use_fast
    tokenizer_hf_no_include_special_tokens trust_remote_code null_tokenizer_eod_id
    null_tokenizer_pad_id chat_template
"""

EVALUATION_AND_CHECKPOINTS = """
    start_eval_at_iter eval_global_batch_size eval_micro_batch_size skip_train test_mode
    full_validation multiple_validation_sets validation_set_names save_retain_interval
    load_main_params_from_ckpt non_persistent_save_interval non_persistent_ckpt_type
    non_persistent_global_ckpt_dir non_persistent_local_ckpt_dir non_persistent_local_ckpt_algo
    finetune pretrained_checkpoint ckpt_step use_checkpoint_args use_mp_args_from_checkpoint_args
    use_tokenizer_model_from_checkpoint_args exit_on_missing_checkpoint auto_detect_ckpt_format
    ckpt_convert_format ckpt_convert_save ckpt_convert_update_legacy_dist_opt_format
    ckpt_fully_parallel_save async_ckpt_cpu_priority async_ckpt_io_priority
    async_ckpt_use_cpu_shm ckpt_fully_parallel_load ckpt_fully_parallel_load_exchange_algo
    ckpt_fully_parallel_save_process_group ckpt_fully_parallel_load_process_group
    ckpt_assume_constant_structure ckpt_load_validate_sharding_integrity dist_ckpt_strictness
    dist_ckpt_save_pre_mcore_014 dist_ckpt_optim_fully_reshardable
    distrib_optim_fully_reshardable_mem_efficient replication replication_jump replication_factor
    verify_integrity stream_ckpt_dequant no_save_optim no_save_rng no_load_optim no_load_rng
    override_ckpt_iteration dist_ckpt_workers override_opt_param_scheduler
    use_checkpoint_opt_param_scheduler
"""

LOGGING = """
    log_interval log_progress tensorboard_dir tensorboard_log_interval tensorboard_queue_size
    log_loss_scale_to_tensorboard log_validation_ppl_to_tensorboard log_memory_interval
    log_device_memory_used log_world_size_to_tensorboard wandb_project wandb_exp_name
    wandb_save_dir wandb_entity logging_level enable_one_logger one_logger_project
    one_logger_run_name one_logger_async app_tag_run_name app_tag_run_version profile
    profile_step_start profile_step_end use_pytorch_profiler pytorch_profiler_collect_shapes
    pytorch_profiler_collect_callstack pytorch_profiler_collect_chakra profile_ranks
    record_memory_history memory_snapshot_path record_shapes nvtx_ranges manual_gc
    manual_gc_interval manual_gc_eval empty_unused_memory_level
"""

INFERENCE = """
    inference_batch_times_seqlen_threshold max_tokens_to_oom output_bert_embeddings
    bert_embedder_type use_legacy_static_engine inference_max_requests inference_max_seq_length
    inference_dynamic_batching inference_dynamic_batching_buffer_size_gb
    inference_dynamic_batching_paused_buffer_size_gb inference_dynamic_batching_mamba_memory_ratio
    inference_dynamic_batching_block_size inference_dynamic_batching_max_requests
    inference_dynamic_batching_max_tokens inference_dynamic_batching_num_cuda_graphs
    inference_dynamic_batching_track_paused_request_events
    inference_dynamic_batching_track_generated_token_events decode_only_cuda_graphs
    inference_cuda_graph_all_prefills inference_cuda_graph_max_tokens inference_cuda_graph_scope
    inference_dynamic_batching_unified_memory_level enable_chunked_prefill num_speculative_tokens
    inference_dynamic_batching_enable_prefix_caching
    inference_dynamic_batching_prefix_caching_eviction_policy
    inference_dynamic_batching_prefix_caching_coordinator_policy
    inference_dynamic_batching_prefix_caching_routing_alpha
    inference_dynamic_batching_prefix_caching_mamba_gb
    inference_dynamic_batching_cuda_graph_mixed_prefill_count
    inference_dynamic_batching_cuda_graph_sizing_distribution
    inference_dynamic_batching_sampling_backend offset_sampling_seed_by_dp_rank
    inference_dynamic_batching_async_sched_mode inference_dynamic_batching_logprobs_mode
    inference_logging_step_interval inference_text_gen_server_logging inference_wandb_logging
    inference_coordinator_port mamba_inference_conv_states_dtype mamba_inference_ssm_states_dtype
    inference_use_synchronous_zmq_collectives inference_disable_ep_consensus inference_shards
    nccl_all_reduce_for_prefill inference_fuse_tp_communication
    inference_disable_triton_nvls_kernels inference_grouped_gemm_backend
    inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type
    mlp_chunks_for_prefill flash_decode batch_invariant_mode cache_mla_latents
    moe_pad_experts_for_cuda_graph_inference
"""

OTHER_MODELS = """
    ict_head_size biencoder_projection_dim biencoder_shared_query_context_model ict_load bert_load
    titles_data_path query_in_block_prob use_one_sent_docs evidence_data_path
    retriever_report_topk_accuracies retriever_score_scaling block_data_path embedding_path
    indexer_batch_size indexer_log_interval num_classes img_h img_w num_channels patch_dim
    classes_fraction data_per_class_fraction data_sharding head_lr_mult vision_pretraining_type
    vision_backbone_type swin_backbone_type mask_type mask_factor iter_per_epoch
    dino_local_img_size dino_local_crops_number dino_head_hidden_size dino_bottleneck_size
    dino_freeze_last_layer dino_norm_last_layer dino_warmup_teacher_temp dino_teacher_temp
    dino_warmup_teacher_temp_epochs
"""

ONLY_WITH_WHAT_IS_REFUSED = """
    overlap_p2p_comm overlap_p2p_comm_warmup_flush microbatch_group_size_per_vp_stage
    cuda_graph_warmup_steps cuda_graph_modules cuda_graph_scope_deprecated wgrad_deferral_limit
    high_priority_a2a_comm_stream
    offload_modules min_offloaded_tensor_size delay_offload_until_cuda_graph
    delta_offload_bytes_across_pp_ranks activation_offload_fraction
    fine_grained_offloading_max_inflight_offloads cpu_offloading_retain_pinned_cpu_buffers
    moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda
    moe_paged_stash_buffer_size_factor_cpu
    fsdp_manual_registration create_all_gather_group data_parallel_sharding_strategy
    outer_dp_sharding_strategy gradient_reduce_div_fusion fsdp_double_buffer
    suggested_communication_unit_size keep_fp8_transpose_cache enable_full_sharding_in_hsdp
    torch_fsdp2_reshard_after_forward strict_fsdp_dtensor_load megatron_fsdp_main_params_dtype
    megatron_fsdp_main_grads_dtype megatron_fsdp_grad_comm_dtype
    megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer
    fsdp_db_use_persist_buf_on_alloc_fail
    fp8_recipe fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len
    fp8_amax_compute_algo fp8_wgrad fp8_output_proj first_last_layers_bf16
    num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 kitchen_attention_backend fp4_recipe
    fp4_quantizer_factory
    use_layer_wise_param_layout
    optimizer_offload_fraction use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d
    pin_cpu_grads pin_cpu_params main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype
    qk_clip_alpha qk_clip_threshold sft_tokenizer_prompt_format error_injection_type
    adlr_autoresume_interval straggler_ctrlr_port straggler_minmax_count
    disable_straggler_on_startup calc_ft_timeouts ft_num_warmup_iters
    moe_routing_trace_max_training_iters moe_routing_trace_capture_logits
    moe_routing_trace_capture_hidden_states moe_routing_trace_dump_weights
    logits_save_top_k logits_save_top_p logits_save_top_p_min_k logits_save_dtype
    logits_load_decode_threads logits_load_prefetch_factor logits_load_msc_prefetch_depth
    logits_load_kd_loss_alpha logits_load_ignore_errors
    inprocess_max_iterations inprocess_monitor_thread_interval
    inprocess_monitor_process_interval inprocess_progress_watchdog_interval
    inprocess_heartbeat_interval inprocess_soft_timeout inprocess_hard_timeout
    inprocess_heartbeat_timeout inprocess_barrier_timeout inprocess_completion_timeout
    inprocess_last_call_wait inprocess_termination_grace_time inprocess_granularity
    inprocess_active_world_size inprocess_empty_cuda_cache
    fault_injector_fault_types fault_injector_fault_probabilities fault_injector_fault_delay
    fault_injector_delay_start_iteration fault_injector_mtti_seconds
    fault_injector_offset_seconds fault_injector_seed
    rl_prompts_per_eval grpo_prompts_per_step grpo_group_size rl_generation_lag
    rl_submission_granularity rl_consumption_granularity grpo_iterations grpo_clamp_eps_lower
    grpo_clamp_eps_upper grpo_kl_beta grpo_entropy_term_weight
    grpo_filter_groups_with_same_reward langrl_env_config rl_default_temperature
    rl_default_top_p rl_default_top_k rl_offload_optimizer_during_inference
    rl_kv_cache_management_mode rl_persist_cuda_graphs rl_partial_rollouts
    rl_inference_logprobs_is_correction rl_importance_sampling_truncation_coef
    rl_use_sequence_packing rl_sequence_packing_max_sequences_per_bin rl_sequence_packing_algo
    rl_training_cuda_graphs rl_inference_tensor_model_parallel_size
    rl_inference_pipeline_model_parallel_size rl_inference_expert_model_parallel_size
    rl_inference_expert_tensor_model_parallel_size rl_inference_model_unified_memory_level
    rl_offload_inference_model_weights_when_idle refit_method rl_verify_model_weights_swap
    rl_skip_bos_token rl_profile_dir rl_inference_parsers
"""

WITHOUT_EFFECT = """
    rampup_batch_size batch_size warmup model_parallel_size checkpoint_activations
    deprecated_use_mcore_models use_dist_ckpt_deprecated dist_ckpt_format_deprecated
    ckpt_fully_parallel_save_deprecated
"""

ONLY_IN_0_18 = """
    rl_generation_batch_size rl_num_parallel_generation_batches rl_num_parallel_generations
    rl_parallel_generation_tasks
"""

INDIFFERENT = {
    "shape of the model": MODEL_SHAPE,
    "mixture of experts: shape, routing, kernels": EXPERTS,
    "initialization": INITIALIZATION,
    "launch": LAUNCH,
    "data": DATA,
    "tokenizer": TOKENIZER,
    "evaluation and checkpoints, which come after a drain": EVALUATION_AND_CHECKPOINTS,
    "logging, profiling and memory of each rank": LOGGING,
    "inference": INFERENCE,
    "models other than language models": OTHER_MODELS,
    "only together with a feature that is refused": ONLY_WITH_WHAT_IS_REFUSED,
    "deprecated, ignored or refused by Megatron": WITHOUT_EFFECT,
    "reinforcement learning, Megatron-Core 0.18 alone": ONLY_IN_0_18,
}
"""Topic to blank-separated names."""
