"""Train a reward model, a sequence classifier with one score, on pairs of preferred and rejected answers.

    accelerate launch --config_file accelerate_configs/fsdp2_cpu.yaml recipes/reward.py --config smollm2_135m_reward

A recipe is a YAML file of the arguments of TRL's RewardConfig and of Trainer. Rows have chosen and rejected, and may
have prompt. The base can be a language model; its new head is initialized on rank 0.

A run writes to --output_dir what recipes/sft.py writes, and resumes in the same way. docs/trainers.md has the details.
"""

from hf_fsdp_recipes.training.run import start

if __name__ == "__main__":
    start("reward")
