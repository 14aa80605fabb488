from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from d3d.cli import app as app_module
from d3d.cli import system_report
from d3d.cli.app import app, main
from d3d.cli.system_report import Device
from d3d.errors import D3DError, InvalidRequest
from support.tiny_gguf import write_tiny_gguf


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `d3d arguments`, as a user's shell sees
    them."""
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=True)
    return result.exit_code, result.stdout, result.stderr


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["d3d", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def commands() -> list[str]:
    return [str(command.name) for command in app.registered_commands]


@pytest.mark.parametrize("command", [[], *[[name] for name in commands()]])
def test_every_help_text_says_what_the_command_and_each_option_do(command: list[str]) -> None:
    code, output, _ = run(*command, "--help")
    assert code == 0
    assert "Usage: d3d" in output or "Usage: root" in output
    group = typer.main.get_command(app)
    parameters = group.commands[command[0]].params if command else group.params  # type: ignore[attr-defined]
    for parameter in parameters:
        assert getattr(parameter, "help", None), f"{command} {parameter.name} has no help"


def test_help_needs_neither_torch_nor_transformers() -> None:
    script = (
        "import sys\nfrom d3d.cli.app import main\nsys.argv = ['d3d', '--help']\ntry:\n    "
        "main()\nexcept SystemExit:\n"
        "    print(sorted({'torch', 'transformers', 'numpy'} & sys.modules.keys()))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[-1] == "[]"


def test_version_names_the_installed_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "--version") == 0
    name, number = capsys.readouterr().out.split()
    assert name == "d3d"
    assert number.count(".") == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["--no-such-flag"],
        ["no-such-command"],
        ["doctor", "--context", "0"],
        ["doctor", "--context", "x"],
    ],
)
def test_a_wrong_command_line_exits_with_2(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, *arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert arguments[-1] in output.err or "context" in output.err


def test_an_unknown_model_gives_one_line_and_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "pull", "nonsense") == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("d3d: error: no model 'nonsense'")
    assert output.err.count("\n") == 1


def test_an_error_of_several_lines_is_printed_as_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise InvalidRequest("the prompt\nis empty")

    monkeypatch.setattr(app_module, "app", fail)
    assert run_main(monkeypatch) == 2
    assert capsys.readouterr().err == "d3d: error: the prompt is empty\n"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("generate", "--nope"), "--nope"),
        (("generate",), "PROMPT: it is missing"),
        (("nonsense",), "nonsense"),
        (("generate", "--prompt", "x", "--max-tokens", "many"), "--max-tokens"),
    ],
)
def test_wrong_usage_gives_one_line_and_2(
    arguments: tuple[str, ...],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_main(monkeypatch, *arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("d3d: error: ")
    assert reason in output.err
    assert output.err.count("\n") == 1


@pytest.mark.parametrize(
    "message",
    ["CUDA out of memory. Tried to allocate 2 GiB", "DefaultCPUAllocator: can't allocate memory"],
)
def test_running_out_of_memory_says_what_to_do(
    message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(app_module, "app", fail)
    assert run_main(monkeypatch) == 2
    assert "--dtype bfloat16" in capsys.readouterr().err


def test_another_runtime_error_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(app_module, "app", fail)
    with pytest.raises(RuntimeError, match="a mistake"):
        run_main(monkeypatch)


def test_ctrl_c_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("d3d.hub.names.resolve_model", interrupted)
    assert run_main(monkeypatch, "pull", "smollm2-135m") == 130


def test_pull_without_names_lists_the_presets(cache: Path) -> None:
    code, output, _ = run("pull")
    assert code == 0
    assert "smollm2-135m" in output
    assert "Apache-2.0; not fetched" in output


def test_pull_makes_each_model_ready_and_prints_where_it_lies(cache: Path, tmp_path: Path) -> None:
    from gguf import GGMLQuantizationType

    sources = [
        str(write_tiny_gguf(tmp_path / name, GGMLQuantizationType.F16).path)
        for name in ("one.gguf", "two.gguf")
    ]
    code, output, _ = run("pull", *sources)
    assert code == 0
    lines = output.splitlines()
    assert [line.split(": ")[0] for line in lines] == sources
    assert all((Path(line.split(": ")[1]) / "model.safetensors").is_file() for line in lines)


@pytest.fixture
def tiny_gguf(cache: Path, tmp_path: Path) -> str:
    from gguf import GGMLQuantizationType

    return str(write_tiny_gguf(tmp_path / "tiny.gguf", GGMLQuantizationType.F16).path)


def test_doctor_reports_machine_cache_and_target(tiny_gguf: str, cache: Path) -> None:
    run("pull", tiny_gguf)
    code, output, _ = run("doctor", "--json", "--target", tiny_gguf, "--context", "100")
    assert code == 0
    facts = json.loads(output)
    assert {"python", "torch", "transformers", "d3d"} <= facts["versions"].keys()
    assert facts["devices"][0]["name"] == "cpu"
    assert facts["threads"] >= 1
    assert facts["cache"]["path"] == str(cache)
    assert [item["name"].startswith("converted/tiny-") for item in facts["cache"]["items"]] == [
        True
    ]
    target = facts["target"]
    tokens = 2 * 2 * 2 * 16 * 100  # keys and values, layers, kv heads, head size, context
    assert [fit["needed_bytes"] for fit in target["fits"][:2]] == [
        (target["num_parameters"] + tokens) * 4,
        (target["num_parameters"] + tokens) * 2,
    ]


def test_doctor_reads_well_without_a_target(cache: Path) -> None:
    code, output, _ = run("doctor")
    assert code == 0
    assert output.startswith("versions   python ")
    assert "cache      " in output
    assert "empty" in output


@pytest.mark.parametrize(
    ("available", "advice"),
    [
        (10**9, "it fits: --device cpu --dtype float32 or bfloat16"),
        (230_000, "it fits: --device cpu --dtype bfloat16"),
        (200_000, "it fits with at most"),
        (1000, "it does not fit any device here"),
    ],
)
def test_doctor_advises_by_the_available_memory(
    available: int, advice: str, tiny_gguf: str
) -> None:
    device = Device("cpu", "test", available, available, ("float32", "bfloat16"))
    report = system_report.target_report(tiny_gguf, 128, [device])
    assert report.advice.startswith(advice), (report, available)


@pytest.mark.parametrize(
    ("available", "advice"),
    [
        (230_000, "it fits: --device cpu --dtype bfloat16"),
        (200_000, "it fits: --device cpu --dtype bfloat16 --quantize int8"),
        (1000, "it does not fit any device here"),
    ],
)
def test_doctor_advises_rounded_weights_where_nothing_else_fits(
    available: int, advice: str, tiny_gguf: str
) -> None:
    device = Device("cpu", "test", available, available, ("float32", "bfloat16"), ("int8",))
    report = system_report.target_report(tiny_gguf, 128, [device])
    assert report.advice.startswith(advice), (report, available)
    assert ("--quantize" in report.advice) == ("--quantize" in advice)
    sizes = {(fit.dtype, fit.quantize): fit.needed_bytes for fit in report.fits}
    assert sizes["bfloat16", "int8"] < sizes["bfloat16", None] < sizes["float32", None]


def test_doctor_does_not_download_a_preset(cache: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--target", "smollm2-135m"])
    assert isinstance(result.exception, D3DError)
    assert "d3d pull smollm2-135m" in str(result.exception)


@pytest.mark.slow
def test_the_readme_command_runs_from_another_folder(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "d3d.cli.app", "pull", "nope"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("d3d: error: ")
    assert result.stderr.count("\n") == 1
