"""Write the golden files under tests/golden/lerobot from LeRobot itself.

Run by hand, in its own environment (LeRobot needs Python >= 3.12, so it cannot share the project's):

    python3.12 -m venv .venv312
    .venv312/bin/pip install --no-deps lerobot==0.6.1 transformers==5.5.4 tokenizers==0.22.2
    .venv312/bin/pip install torch==2.11.0 torchvision==0.26.0 "numpy<2.3" "pillow<13" "draccus>=0.11.6,<0.12" \\
        "huggingface-hub>=1.6,<2" "packaging<26" safetensors einops gymnasium requests termcolor tqdm regex typer \\
        "opencv-python-headless<4.14"
    .venv312/bin/python tests/golden/make_lerobot_golden.py

Everything is fp32 on the CPU with seeded weights and inputs. README.md in this folder describes each file.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import torch
from lerobot_tiny import TinySizes, build_policy, build_tokenizer
from write_models import write_models
from write_processors import PIPELINES, write_images, write_pipeline, write_policy_cases
from write_rtc import write_rtc

GOLDEN = Path(__file__).parent / "lerobot"
MODEL_SEEDS = {"pi05": 5, "pi0": 6}


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    shutil.rmtree(GOLDEN, ignore_errors=True)
    GOLDEN.mkdir(parents=True)
    tokenizer = build_tokenizer(GOLDEN / "tokenizer")
    sizes = TinySizes()
    policies = {family: build_policy(family, sizes, seed=seed) for family, seed in MODEL_SEEDS.items()}
    for family, policy in policies.items():
        write_models(GOLDEN / f"{family}_tiny", policy, sizes)
        write_policy_cases(GOLDEN / f"{family}_tiny", policy, tokenizer)
    for name in PIPELINES:
        write_pipeline(GOLDEN / "processors" / name, name, tokenizer)
    write_images(GOLDEN / "processors", build_policy("pi05", replace(sizes, image_size=224), seed=0))
    write_rtc(GOLDEN, policies)


if __name__ == "__main__":
    main()
