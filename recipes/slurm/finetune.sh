#!/bin/bash
# recipes/launch.slurm with the six positional arguments of ROCm's FSDP scripts, for one node or many:
#
#   sbatch --nodes=2 recipes/slurm/finetune.sh n_proc_per_node n_epoch n_batchsize model_path model_size save_model
#   sbatch --nodes=2 recipes/slurm/finetune.sh 8 1 16 ./meta-llama/Llama-2-7b-hf 2-7B True
#
# n_batchsize is the batch size per GPU; model_size is only a label in the name of the run. save_model True writes a
# checkpoint after each epoch, False writes none; the trained model is exported either way. In the environment,
# set DATASET (default: tatsu-lab/alpaca) and launch.slurm's variables. More arguments for recipes/sft.py may follow.
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
set -euo pipefail

: "${SLURM_JOB_ID:?submit this with sbatch}"
[ $# -ge 6 ] || { sed -n '4p' "$0" >&2; exit 2; }
n_proc_per_node=$1 n_epoch=$2 n_batchsize=$3 model_path=$4 model_size=$5 save_model=$6
shift 6
case $save_model in
  True | true) strategy=epoch ;;
  False | false) strategy=no ;;
  *) echo "save_model is $save_model; set it to True or False" >&2; exit 2 ;;
esac

export NPROC_PER_NODE=$n_proc_per_node
# The job id keeps the name stable across requeues and different for the next submission.
run=fsdp_${model_size}_${SLURM_NNODES}node_${n_proc_per_node}proc_${n_epoch}epoch_batch${n_batchsize}_job$SLURM_JOB_ID
launch=recipes/launch.slurm
[ -f "$launch" ] || launch=launch.slurm # outside a checkout, from `hf-fsdp recipes copy`
exec bash "$launch" --model_name_or_path "$model_path" --dataset_name "${DATASET:-tatsu-lab/alpaca}" --prompt_format alpaca \
  --num_train_epochs "$n_epoch" --per_device_train_batch_size "$n_batchsize" --save_strategy "$strategy" \
  --output_dir "runs/$run" "$@"
