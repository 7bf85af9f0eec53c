"""What the README shows is true: its script runs as one process and as two, and its tables name what exists."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from collie_tools.layers import find_packages

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
README_ZH = (ROOT / "README.zh.md").read_text(encoding="utf-8")

LAUNCHERS = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
}


def readme_script() -> str:
    (script,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    return script


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_script_trains_and_saves_what_transformers_reads(launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(readme_script(), encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*LAUNCHERS[launcher], str(script)],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.count("ppl") == 1, done.stdout

    from transformers import AutoModelForCausalLM

    model, loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "fox", output_loading_info=True)
    assert not loaded["missing_keys"] and not loaded["unexpected_keys"]
    assert model.config.vocab_size == 256


@pytest.mark.parametrize("text", [README, README_ZH], ids=["en", "zh"])
def test_table_of_packages_is_complete(text: str) -> None:
    for package in find_packages(ROOT):
        assert re.search(rf"^\| `{package.distribution}` \| `{package.module}` \|", text, flags=re.M)


def test_chinese_table_names_every_parameter_of_the_trainer() -> None:
    from collie_train import Trainer

    table = README_ZH.split("## Trainer 参数")[1]
    named = {name for row in re.findall(r"^\| (`.*?`) \|", table, flags=re.M) for name in re.findall(r"`(\w+)`", row)}
    assert named == set(inspect.signature(Trainer).parameters)
