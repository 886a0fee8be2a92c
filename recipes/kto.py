"""Align a language model with answers that are good or bad (KTO), with all parameters or LoRA.

    accelerate launch --config_file accelerate_configs/fsdp2_cpu.yaml recipes/kto.py --config smollm2_135m_kto

A recipe is a YAML file of the arguments of TRL's KTOConfig and of Trainer. Rows have prompt, completion and label, or are
pairs as for DPO. The reference model is sharded like the model; with LoRA it is the base model.

A run writes to --output_dir what recipes/sft.py writes, and resumes in the same way. docs/trainers.md has the details.
"""

from hf_fsdp_recipes.training.run import start

if __name__ == "__main__":
    start("kto")
