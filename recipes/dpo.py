"""Align a language model with pairs of preferred and rejected answers (DPO), with all parameters or LoRA.

    accelerate launch --config_file accelerate_configs/fsdp2_cpu.yaml recipes/dpo.py --config smollm2_135m_dpo

A recipe is a YAML file of the arguments of TRL's DPOConfig and of Trainer. Rows have prompt, chosen and rejected. The
reference model is sharded like the model; with LoRA it is the base model without its adapter.

A run writes to --output_dir what recipes/sft.py writes, and resumes in the same way. docs/trainers.md has the details.
"""

from hf_fsdp_recipes.training.run import start

if __name__ == "__main__":
    start("dpo")
