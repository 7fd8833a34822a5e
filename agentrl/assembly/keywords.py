"""Settings as keywords of `train`, `sft` and `evaluate`, for editors and type checkers.

`make reference` writes this file from the settings themselves, which are checked when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import Literal, TypeAlias, TypedDict

from agentrl.envs import AnyEnv
from agentrl.types import JSON

Name: TypeAlias = str | PathLike[str]
Function: TypeAlias = str | Callable[..., object]
"""A function, or its name."""
Rows: TypeAlias = Iterable[Mapping[str, JSON]]
"""Rows of prompts or conversations: a list of mappings, or a dataset."""
Data: TypeAlias = Name | Sequence[Name] | Rows | Mapping[str, object]
"""Files, or rows; or a table of names and sets: `object`, as type checkers infer no union in a dict."""


class _Settings(TypedDict, total=False):
    """Keywords of all three."""

    seed: int
    num_threads: int | None
    reset_timeout_s: float | None
    tool_timeout_s: float | None
    step_timeout_s: float | None
    reward_timeout_s: float | None
    episode_timeout_s: float | None
    max_tool_chars: int | None
    max_calls_per_turn: int | None
    custom_generate_function_path: Function | None
    generate_function_paths: Sequence[Name]
    rollout_sample_hook_path: Function | None
    reward: Function | None
    reward_kwargs: Mapping[str, JSON]
    env_reward_weight: float | None
    group_reward: Function | None
    group_reward_kwargs: Mapping[str, JSON]
    opponents: Mapping[str, Name]
    tools: Sequence[Name]
    tool_kwargs: Mapping[str, Mapping[str, JSON]]
    env_kwargs: Mapping[str, JSON]
    input_key: Name
    label_key: Name | None
    metadata_key: Name | None
    tool_key: Name | None
    prompt_data: Data | None
    rollout_stop: Sequence[Name]
    rollout_stop_token_ids: Sequence[int]
    dialect: Literal["own", "inline", "chat"]
    chat_format: Name
    apply_chat_template_kwargs: Mapping[str, JSON]
    rollout_max_context_len: int | None
    max_turns: int | None
    cluster: Literal["local", "ray"]
    ray_address: Name | None
    placement_timeout_s: float
    num_cpus_per_rank: float
    num_cpus_per_server: float
    num_gpus_per_rank: int | None
    num_cpus_per_rollout_worker: float | None
    ray_env_vars: Sequence[Name]
    engine: Literal["embedded", "sglang"]
    max_slots: int
    adaptive_concurrency: bool
    max_context_len: int | None
    enable_deterministic_inference: bool
    engine_dtype: Literal["float32", "bfloat16"]
    sglang_url: Name | Sequence[Name] | None
    rollout_num_engines: int
    rollout_num_gpus_per_engine: int
    num_gpus_per_node: int | None
    sglang_python: Name | None
    sglang: Mapping[str, JSON]
    router: Mapping[str, JSON]
    sglang_groups: Sequence[Mapping[str, JSON]]
    sglang_models: Mapping[str, Mapping[str, JSON]]
    update_weights_transport: Literal["tensor", "distributed", "disk", "delta", "lora"] | None
    pin_policy_version: bool
    rollout_health_check_interval: float
    rollout_health_check_timeout: float
    rollout_health_check_first_wait: float
    n_samples_per_eval_prompt: int
    eval_top_p: float | None
    eval_top_k: int | None
    eval_max_response_len: int | None
    custom_rm_path: object
    reward_fn_path: object
    rm_type: object
    rm_url: object
    prompt_key: object
    apply_chat_template: object
    eval_config: object


class TrainSettings(_Settings, total=False):
    """Keywords of `agentrl.train`."""

    name: Name | None
    output_dir: Name
    inline: bool
    use_tensorboard: bool
    env: str | type[AnyEnv]
    train_split: Name
    rollout_max_prompt_len: int | None
    rollout_shuffle: bool
    data_source_path: Function | None
    hf_checkpoint: Name | None
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    rotary_base: float
    vocab_size: int
    num_epoch: int
    sft_data: Data | None
    messages_key: Name
    tools_key: Name | None
    min_reward: float | None
    sft_batch_size: int
    sft_lr: float | None
    eval_sft_data: Data | None
    warm_start_steps: int
    warm_start_batch_size: int
    warm_start_lr: float
    warm_start_split: Name
    num_demonstrations: int | None
    num_rollout: int
    rollout_batch_size: int | None
    n_samples_per_prompt: int
    num_steps_per_rollout: int
    global_batch_size: int | None
    rollout_temperature: float
    rollout_top_p: float
    rollout_top_k: int
    replay_sampling_mask: bool | None
    return_routed_experts: bool | None
    rollout_max_response_len: int | None
    shuffle_rewards: bool
    max_episode_retries: int
    group_timeout_s: float | None
    rollout_function_path: Function | None
    dynamic_sampling_filter_path: Function | None
    max_num_gen_batches: int
    over_sampling_batch_size: int | None
    buffer_filter_path: Function | None
    rollout_sample_filter_path: Function | None
    custom_reward_post_process_path: Function | None
    custom_convert_samples_to_train_data_path: Function | None
    custom_rollout_log_function_path: Function | None
    custom_update_weight_post_write_path: Function | None
    privileged_context_path: Function | None
    max_staleness: int
    staleness_policy: Literal["window", "strict", "ready_first"]
    staleness_window: int | None
    async_buffer_size: int | None
    update_weights_interval: int
    partial_rollout: bool | None
    data_buffer_size: int
    data_buffer_groups: int
    data_buffer_filter_path: Function | None
    max_idle_rollouts: int | None
    num_rollout_workers: int
    replay: Name | None
    debug_rollout_only: bool
    advantage_estimator: Literal[
        "grpo",
        "dr_grpo",
        "rloo",
        "maxrl",
        "opo",
        "otb",
        "gpg",
        "grpo_passk",
        "gdpo",
        "bnpo",
        "gigpo",
        "gspo",
        "gmpo",
        "cispo",
        "sapo",
        "vespo",
        "dppo",
        "remax",
        "rae",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "ppo",
    ]
    loss_weighting: Literal["token", "sample", "rollout", "prompt", "constant"] | None
    normalize_advantages: bool | None
    credit_level: Literal["episode", "turn"]
    eps_clip: float | None
    eps_clip_high: float | None
    eps_clip_c: float | None
    scale_rewards: Literal["group", "batch", "none"]
    gamma: float
    gdpo_weights: Mapping[str, float]
    gigpo_step_advantage_weight: float
    sapo_tau_positive: float
    sapo_tau_negative: float
    vespo_k_positive: float
    vespo_lambda_positive: float
    vespo_k_negative: float
    vespo_lambda_negative: float
    dppo_divergence: Literal["tv", "kl"]
    rae_decay: float
    discount_per: Literal["token", "turn"]
    lambd: float
    value_clip: float
    bootstrap_truncated: bool
    critic_lr: float | None
    critic_lr_warmup_iters: int | None
    critic_weight_decay: float | None
    num_critic_only_steps: int
    critic_data: Data | None
    critic_data_epochs: int
    custom_advantage_function_path: Function | None
    rollout_data_postprocess_path: Function | None
    custom_loss_function_path: Function | None
    custom_pg_loss_reducer_function_path: Function | None
    shaping_scale: float
    shaping_low: float | None
    shaping_high: float | None
    shaping_turn_penalty: float
    shaping_overlong_len: int | None
    shaping_overlong_buffer_len: int
    shaping_overlong_penalty: float
    hierarchy_roles: Mapping[str, Name]
    hierarchy_reward_shares: Mapping[str, Mapping[str, float]]
    kl_coef: float
    use_kl_loss: bool
    kl_loss_coef: float
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"]
    use_unbiased_kl: bool
    kl_target: float | None
    kl_horizon: float
    ref_load: Name | None
    ref_update_interval: int | None
    ref_mixup_alpha: float
    ppo_epochs: int
    entropy_coef: float
    entropy_target: float | None
    entropy_coef_step: float
    entropy_control: Literal["none", "clip_cov", "kl_cov", "top_entropy"]
    clip_cov_ratio: float
    clip_cov_low: float
    clip_cov_high: float
    kl_cov_ratio: float
    kl_cov_coef: float
    top_entropy_quantile: float
    use_opd: bool
    opd_kl_coef: float
    opd_only: bool
    opd_teacher: Literal["self", "reference"] | None
    opd_teacher_load: Name | None
    opd_teacher_url: Name | None
    opd_teacher_key_env: Name | None
    opd_teacher_timeout_s: float
    opd_teacher_concurrency: int
    use_rollout_logprobs: bool | None
    correction: Literal["none", "tis", "mis", "icepop", "custom", "opsm"]
    accept_bias: bool
    self_normalize_correction: bool
    tis_clip: float
    tis_clip_low: float
    mis_level: Literal["token", "sequence", "geometric"]
    mis_mode: Literal["truncate", "clip", "mask"]
    mis_lower: float | None
    mis_upper: float | None
    mis_veto: float | None
    icepop_low: float
    icepop_high: float
    custom_tis_function_path: Function | None
    opsm_delta: float
    gate_statistic: Literal["none", "k1", "k2", "k3"]
    gate_over: Literal["token", "mean", "sum", "max"]
    gate_upper: float | None
    gate_lower: float | None
    mask_offpolicy_in_partial_rollout: bool
    trainer: Literal["torch", "megatron"]
    device: Literal["cpu", "cuda"]
    fsdp_size: int | None
    optimizer: Literal["adamw", "muon"]
    optimizer_cpu_offload: bool
    reset_optimizer_states: bool
    lr: float
    min_lr: float
    lr_warmup_iters: int
    lr_decay_style: Literal["constant", "linear", "cosine"]
    lr_decay_iters: int | None
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    clip_grad: float
    max_tokens_per_gpu: int
    bf16: bool
    router_replay: Literal["R2", "R3"] | None
    moe_aux_loss_coeff: float
    moe_z_loss_coeff: float
    enable_mtp_training: bool
    mtp_loss_scaling_factor: float
    gradient_checkpointing: bool
    only_train_params_name_list: Sequence[Name]
    freeze_params_name_list: Sequence[Name]
    lora_rank: int | None
    lora_alpha: int
    lora_target_modules: Name
    colocate: bool
    offload_rollout: bool | None
    offload_train: bool | None
    actor_num_nodes: int
    actor_num_gpus_per_node: int
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    num_virtual_stages_per_pipeline_rank: int
    decoder_first_pipeline_num_layers: int | None
    decoder_last_pipeline_num_layers: int | None
    context_parallel_size: int
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int | None
    sequence_parallel: bool
    use_distributed_optimizer: bool
    offload: bool
    recompute_granularity: Literal["full", "selective"] | None
    megatron_config: Mapping[str, JSON]
    custom_megatron_init_path: Function | None
    custom_model_provider_path: Function | None
    custom_megatron_before_log_prob_hook_path: Function | None
    custom_megatron_before_train_step_hook_path: Function | None
    custom_megatron_after_train_step_hook_path: Name | None
    custom_megatron_before_save_hook_path: Name | None
    eval_interval: int
    eval_prompt_data: Data | None
    eval_split: Name
    eval_episodes: int
    eval_temperature: float
    skip_eval_before_train: bool
    eval_function_path: Function | None
    async_eval: bool | None
    eval_engine: Literal["shared", "own"]
    save_interval: int
    save_total_limit: int
    metric_for_best_model: Name | None
    max_restarts: int
    callback: Function | None
    use_wandb: bool
    wandb_project: Name
    wandb_group: Name | None
    wandb_mode: Literal["online", "offline", "disabled"]
    use_prometheus: bool
    prometheus_host: Name
    prometheus_port: int
    log_model_config: bool
    profile_step: int | None
    profile_engine_step: int | None
    memory_snapshot_step: int | None
    hang_warning_s: float
    load_debug_rollout_data: object
    use_tis: object
    use_mis: object
    use_icepop: object
    use_opsm: object
    tis_threshold: object
    i_accept_bias: object
    use_critic: object
    calculate_per_token_loss: object
    grpo_std_normalization: object
    disable_grpo_std_normalization: object
    use_rollout_routing_replay: object
    use_routing_replay: object
    record_memory_history: object


class EvalSettings(_Settings, total=False):
    """Keywords of `agentrl.evaluate`."""

    n: int
    temperature: float
    split: Name
    output_dir: Name | None
    break_tool: Sequence[Name]
    openai_url: Name | None
    openai_model: Name | None
    openai_key_env: Name
    openai_max_tokens: int | None
    openai_reasoning: Literal["keep", "drop"]
    openai_body: Mapping[str, JSON]
    openai_omit: Sequence[Name]
    openai_concurrency: int
    openai_timeout_s: float
    openai_attempts: int
    price_prompt: float | None
    price_completion: float | None
    price_cached: float | None
    eval_prompt_data: object


SftSettings: TypeAlias = TrainSettings
"""Keywords of `agentrl.sft`."""
