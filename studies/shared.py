"""Options and notes that the studies have in common."""

from __future__ import annotations

import argparse
import os
import platform
from datetime import date
from pathlib import Path
from typing import Any

import torch

from d3d.api import Model
from d3d.train.prompts import read_prompts


def make_parser(description: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_prompt_options(parser: argparse.ArgumentParser, prompts: int, max_tokens: int) -> None:
    """The file of prompts, how many of them to take, and the longest answer."""
    parser.add_argument("prompts_file", type=Path)
    parser.add_argument("--prompts", type=int, default=prompts)
    parser.add_argument("--max-tokens", type=int, default=max_tokens)


def add_model_options(
    parser: argparse.ArgumentParser, dtype: str = "bfloat16", *, drafter: bool = True
) -> None:
    parser.add_argument("--target", default="smollm2-135m")
    if drafter:
        parser.add_argument("--drafter")
    parser.add_argument("--dtype", default=dtype)
    parser.add_argument("--device", default="auto")


def prompts_of(options: argparse.Namespace, model: Model) -> list[list[int]]:
    """Token ids of the first --prompts prompts."""
    prompts = read_prompts(options.prompts_file, model.tokenizer)
    return [prompt.token_ids for prompt in prompts[: options.prompts]]


def origin(options: argparse.Namespace) -> dict[str, Any]:
    """The settings, the machine and the day, for a study's JSON object."""
    settings = {
        name: value.name if isinstance(value, Path) else value
        for name, value in vars(options).items()
        if name != "json"
    }
    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}"
    )
    return {"settings": settings, "machine": machine, "date": date.today().isoformat()}
