"""Names that other projects and papers give to our settings, so that a message can say what we call them."""

from __future__ import annotations

from collections.abc import Mapping

_NAMES = {
    "staleness.max_staleness": "eta max_off_policy max_lag max_policy_age max_head_offpolicyness async_level",
    "learner.optimizer.learning_rate": "lr actor_lr",
    "learner.optimizer.grad_clip": "clip_grad max_grad_norm gradient_clipping",
    "learner.optimizer.kind": "optim optimizer_type optimizer_name",
    "learner.freeze": "freeze_params frozen_parameters freeze_layers",
    "learner.optimizer.beta1": "adam_beta1",
    "learner.optimizer.beta2": "adam_beta2",
    "learner.optimizer.eps": "adam_eps adam_epsilon",
    "learner.optimizer.schedule": "lr_scheduler lr_scheduler_type",
    "learner.reference.source": "ref_model ref_policy reference_model ref_model_path",
    "learner.n_mini": "ppo_mini_batches num_mini_batches num_minibatches",
    "learner.micro_batch_tokens": "micro_batch_size per_device_train_batch_size max_tokens_per_gpu",
    "learner.checkpoint.every": "save_steps save_interval",
    "batch.group_size": "g num_generations n n_samples n_samples_per_prompt samples_per_prompt rollout_n",
    "batch.groups": "b batch_size train_batch_size prompts_per_step gradient_accumulation_steps",
    "sampling.temperature": "rollout_temperature",
    "sampling.max_new_tokens": "max_tokens max_completion_length max_response_length response_length",
    "objective.kl_beta": "beta kl_coef kl_coeff kl_loss_coef",
    "objective.entropy_coeff": "entropy_coef ent_coef",
    "objective.clip_low": "epsilon eps_clip epsilon_low cliprange",
    "objective.clip_high": "epsilon_high eps_clip_high",
    "objective.loss": "loss_type policy_loss",
    "objective.cap_high": "tis_cap tis_imp_ratio_cap importance_sampling_cap",
    "objective.recipe": "algorithm adv_estimator",
    "model.source": "model_name model_name_or_path model_path pretrained checkpoint_path",
    "model.context_length": "max_model_len max_seq_len max_length",
    "reward.functions": "reward_funcs reward_fn reward_function reward_model",
    "rollout.replicas": "num_workers num_engines num_rollout_workers",
    "run.steps": "max_steps total_steps num_steps",
    "run.epochs": "num_epochs num_train_epochs total_epochs",
    "run.root": "output_dir save_dir",
    "evaluation.every": "eval_steps eval_interval test_freq",
}

_WARP = (
    "completions are sampled from the whole distribution, for a warp of it would bias every ratio; remove it"
)
# What others have and a run here has on purpose not, with the reason.
ABSENT: Mapping[str, str] = {
    **{f"sampling.{name}": _WARP for name in ("top_p", "top_k", "min_p", "repetition_penalty")},
    "objective.temperature": "the learner's logprobs are at sampling.temperature, as the samples are; remove it",
}
ALIASES: Mapping[str, list[str]] = {alias: [path] for path, names in _NAMES.items() for alias in names.split()}
