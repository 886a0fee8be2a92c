"""Measures the package on one accelerator in bounded steps.

For machines that you have for only a few minutes.

    make gpu-day [OUT=runs/gpu-day] [MINUTES=8] [STEPS="lora lora_trl"] [AGAIN=lora]

Each step writes one line to OUT/results.jsonl as soon as it ends, and what it prints to
OUT/log.txt. A second call does what is left. Models have random weights. Models and runs take 60 GB
in OUT. Nothing is fetched. The planner's predictions come first (`python -m
benchmarks.gpu_day.predictions`), in OUT/plan.json; they take minutes, but need no accelerator.
`--scale small` runs the same steps with tiny models, also on CPU ranks.
"""
