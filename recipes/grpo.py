"""Train a language model with rewards for the answers that it generates (GRPO), with all parameters or LoRA.

    accelerate launch --config_file accelerate_configs/fsdp2_cpu.yaml recipes/grpo.py --config smollm2_135m_grpo

A recipe is a YAML file of the arguments of TRL's GRPOConfig and of Trainer, with reward_funcs or
reward_model_name_or_path as in TRL's script. Rows have a prompt and what the reward functions need.

A run writes to --output_dir what recipes/sft.py writes, and resumes in the same way. docs/trainers.md has the details.
"""

from hf_fsdp_recipes.training.run import start

if __name__ == "__main__":
    start("grpo")
