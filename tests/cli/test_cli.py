"""Every command: what it prints, its JSON, its exit code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import networkx
import pytest
from typer.testing import CliRunner

import roamc
from roamc.cli import request
from roamc.cli.commands import app
from roamc.cli.demo import text
from roamc.cli.demo.race import Result, race
from roamc.cli.demo.worker import Task
from roamc.cost import load_profile
from roamc.errors import RoamcError
from roamc.solvers import compiled

SMALL = ["--batch", "2", "--seq", "16", "--layers", "1", "--width", "32", "--heads", "4", "--vocab", "64"]

FILE = """
import torch
from torch import nn

def make(width=8):
    return nn.Linear(width, 4), torch.zeros(2, width)

def fails():
    raise ValueError("no such luck")

def two():
    return nn.Linear(2, 2), (torch.zeros(2, 2), torch.zeros(2, 2))

def scalar():
    model = nn.Linear(2, 2)
    return model, torch.zeros(2, 2), lambda model, x: model(x)

def narrow():
    return nn.Linear(2, 2), torch.zeros(2, 3), lambda model, x: model(x).sum()

def ends():
    raise SystemExit(0)

def nothing():
    return nn.ReLU(), torch.zeros(2, 3), lambda model, x: model(x).sum()

def talks():
    def loss_fn(model, x):
        print("and of its loss")
        return model(x).sum()
    print("a word of the function")
    return nn.Linear(2, 2), torch.zeros(2, 2), loss_fn

class Classifier(nn.Linear):
    def forward(self, x, labels):
        logits = super().forward(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

def classifier():
    return Classifier(8, 4096), {"x": torch.zeros(16, 8), "labels": torch.zeros(16, dtype=torch.long)}

def imports():
    import neighbour
    def loss_fn(model, x):
        from beside import loss
        return loss(model, x)
    return neighbour.model, torch.zeros(2, 2), loss_fn
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return str(path)


def run(*arguments: str, code: int = 0, columns: int | None = None) -> Any:
    """The result of a command line, shown in so many ``columns``; it must end with ``code``."""
    result = CliRunner().invoke(app, arguments, env={} if columns is None else {"COLUMNS": str(columns)})
    assert result.exit_code == code, result.output
    return result


def test_operators_of_the_loss_name_its_line_and_not_that_of_the_package_that_reads_the_command_line() -> None:
    small = ("--layers", "1", "--width", "16", "--heads", "2", "--batch", "2", "--seq", "8", "--vocab", "32")
    source = run("explain", "gpt", *small, "--source").stdout
    assert set(re.findall(r"# (\w+\.py):\d+", source)) == {"zoo.py"}
    assert re.search(r"nll_loss_forward\w*\(.*  # zoo\.py:", source)


def test_version() -> None:
    assert run("--version").stdout.strip() == f"roamc {roamc.__version__}"


def test_help_is_shown_where_no_command_is_given() -> None:
    assert "plan" in run().stdout


def test_python_dash_m_works() -> None:
    done = subprocess.run([sys.executable, "-m", "roamc", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"roamc {roamc.__version__}"


def test_plan_prints_its_table() -> None:
    result = run("plan", "gpt", *SMALL)
    assert result.stdout.startswith("gpt needs ")
    assert "planned in" in result.stdout
    assert result.stderr == ""


def test_plan_as_json_and_saved(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    data = json.loads(run("plan", "gpt", *SMALL, "--json", "--save", str(path)).stdout)
    saved = roamc.Plan.from_json(path.read_text())
    assert data["fits"] is True
    assert data["peak_bytes"] == saved.peak_bytes
    assert set(data["seconds"]) >= {"capture", "reorder", "layout", "verify"}


def test_saved_plan_is_the_same_every_time(tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in paths:
        run("plan", "gpt", *SMALL, "--save", str(path))
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_sequence_is_another_name_of_seq(tmp_path: Path) -> None:
    paths = {word: tmp_path / f"{word}.json" for word in ("--seq", "--sequence")}
    for word, path in paths.items():
        run("plan", "gpt", *(word if each == "--seq" else each for each in SMALL), "--save", str(path))
    assert paths["--seq"].read_bytes() == paths["--sequence"].read_bytes()


def test_optimizer_decides_the_state() -> None:
    fixed = {
        name: json.loads(run("plan", "gpt", *SMALL, "--optimizer", name, "--json").stdout)["fixed_bytes"]
        for name in ("sgd", "adam")
    }
    assert "optimizer state" not in fixed["sgd"]
    assert fixed["adam"]["optimizer state"] == 2 * fixed["adam"]["parameter"]


def test_several_budgets_without_recomputation_have_no_added_time() -> None:
    budgets = ("--memory-budget", "+2%", "--memory-budget", "100%")
    *_, first, second = run("plan", "gpt", *SMALL, *budgets, "--option", "disable=retain").stdout.splitlines()
    assert (first.split()[0], first.count("%"), second.split()[0], second.count("%")) == ("+2%", 1, "100%", 1)


def test_compact_takes_settings_beside_those_of_the_model() -> None:
    def states(*settings: str) -> int:
        sets = [word for setting in settings for word in ("--set", setting)]
        plan = json.loads(run("plan", "gpt", *SMALL, "--optimizer", "compact", *sets, "--json").stdout)
        nbytes: int = plan["fixed_bytes"]["optimizer state"]
        return nbytes

    assert states("rank=0.25", "dropout=0.1") == states() < states("rank=0.5", "basis=orthonormal")
    assert states("rank=1/4", "dense=embed,head,o_proj") == states() < states("dense=absent,.")
    assert "rank=0" in run("plan", "gpt", *SMALL, "--optimizer", "compact", "--set", "rank=0", code=1).stderr
    doubled = run("plan", "gpt", *SMALL, "--option", "codecs=tempo", "--option", "codecs=compact", code=1)
    assert "codecs is given twice" in doubled.stderr
    halves = run("plan", "gpt", *SMALL, "--optimizer", "sgd", "--forward-backward", code=1)
    assert "--forward-backward leaves out" in halves.stderr
    assert "'rank'" in run("plan", "gpt", *SMALL, "--set", "rank=0.5", code=1).stderr, "AdamW has none"


def test_codecs_are_planned_without_a_gpu_and_bad_ones_are_errors() -> None:
    how = ("plan", "gpt", *SMALL, "--optimizer", "compact", "--set", "rank=0.25", "--device", "cuda")
    for codec, name in (("tempo", "tempo"), ("compact:rank=1/8", "compact:rank=0.125")):
        assert f"note: codec {name}" in run(*how, "--option", f"codecs={codec}").stdout
    for codec in ("compact:rank=0", "compact:rank=1.5", "tempo:rank=1", "temp"):
        assert run(*how, "--option", f"codecs={codec}", code=1).stderr.startswith("error: codecs: ")
    for setting in ("rank=1.5", "rank=True", "every=0", "basis=gauss"):
        assert "CompAct" in run("plan", "gpt", *SMALL, "--optimizer", "compact", "--set", setting, code=1).stderr


def test_optimizer_beside_that_of_the_function_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "import torch\n"
        "def make():\n"
        "    loss = lambda model, x: model(x).sum()\n"
        "    return torch.nn.Linear(2, 2), torch.ones(1, 2), loss, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)\n"
    )
    said = run("plan", f"{file}:make", "--optimizer", "adamw", code=1).stderr
    assert said == f"error: {file}:make returns an optimizer: leave --optimizer adamw out\n"
    fixed = json.loads(run("plan", f"{file}:make", "--json").stdout)["fixed_bytes"]
    assert fixed["optimizer state"] == fixed["parameter"]


def test_forward_backward_has_no_optimizer() -> None:
    data = json.loads(run("plan", "gpt", *SMALL, "--forward-backward", "--json").stdout)
    assert set(data["fixed_bytes"]) == {"parameter", "input"}


def test_settings_and_options_reach_the_plan() -> None:
    arguments = ["--set", "dropout=0.5", "--option", "order=program", "--clip-grad-norm", "1"]
    data = json.loads(run("plan", "gpt", *SMALL, *arguments, "--json").stdout)
    assert data["decisions"]["reorder"]["algorithm"].startswith("program")
    assert "clip_grad_norm" in data["notes"][0]


@pytest.mark.parametrize("command", ["plan", "explain"])
def test_exit_code_is_two_where_it_does_not_fit(command: str) -> None:
    result = run(command, "gpt", *SMALL, "--memory-budget", "1kB", "--json", code=2)
    assert result.stderr.startswith("does not fit: gpt needs")
    assert "memory_budget=1 kB" in result.stderr
    assert "Raise the budget, or use a smaller batch" in result.stderr
    assert json.loads(result.stdout)["fits"] is False


def test_several_budgets_are_compared_in_one_table() -> None:
    budgets = [part for budget in ("90%", "60%", "min") for part in ("--memory-budget", budget)]
    points = json.loads(run("plan", "gpt", *SMALL, *budgets, "--json").stdout)
    assert [point["budget"] for point in points] == ["90%", "60%", "min"]
    assert all(point["fits"] for point in points)
    peaks, added = ([point[key] for point in points] for key in ("needed_bytes", "added_seconds"))
    assert peaks == sorted(peaks, reverse=True)
    assert added == sorted(added)
    shown = run("plan", "gpt", *SMALL, *budgets).stdout
    assert re.search(r"budget +needs +total +of eager's +added time", shown)
    assert re.search(r"budget +light", run("plan", "gpt", *SMALL, "--memory-budget", "light").stdout)
    refused = run("plan", "gpt", *SMALL, "--memory-budget", "1kB", "--memory-budget", "90%", "--json", code=2)
    assert [point["fits"] for point in json.loads(refused.stdout)] == [False, True]


def test_explain_shows_what_lower_peaks_cost() -> None:
    curve = json.loads(run("explain", "gpt", *SMALL, "--memory-budget", "70%", "--json").stdout)["curve"]
    peaks, added = ([spot[key] for spot in curve["spots"]] for key in ("needed_bytes", "added_seconds"))
    assert peaks == sorted(peaks, reverse=True)
    assert added == sorted(added)
    assert curve["now"]["added_seconds"] > 0
    shown = run("explain", "gpt", *SMALL, "--memory-budget", "70%").stdout
    assert len(re.findall(r"[\d.]+%  +[\d.]+%  #*-* +this plan", shown)) == 1
    assert json.loads(run("explain", "gpt", *SMALL, "--no-curve", "--json").stdout)["curve"] is None


@pytest.mark.parametrize("page", [False, True], ids=["text", "page"])
def test_explain_prints_all_else_before_it_plans_the_curve(
    page: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run("explain", "gpt", *SMALL).stdout
    assert whole.index("by kind") < whole.index("layout") < whole.index("memory against time: ")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(request, "trace", interrupted)
    more = ("--html", str(tmp_path / "plan.html")) if page else ()
    result = CliRunner().invoke(app, ["explain", "gpt", *SMALL, *more])
    assert result.exit_code not in (0, 2)
    times = re.compile(r"planned in .*")
    tables = whole.partition("\nmemory against time: ")[0]
    assert times.sub("", result.stdout).rstrip() == times.sub("", tables).rstrip()


def test_explain_says_what_is_encoded() -> None:
    sizes = ("--batch", "8", "--seq", "64", "--layers", "1", "--width", "128", "--heads", "4", "--vocab", "64")
    for share in range(75, 40, -5):  # the first budget for which a mask is worth packing
        asked = ("explain", "gpt", *sizes, "--set", "dropout=0.1", "--no-curve", "--memory-budget", f"{share}%")
        data = json.loads(run(*asked, "--json").stdout)
        codes = data["plan"]["decisions"]["retain"]["codes"]
        if codes:
            break
    assert codes
    assert sum(row["count"] for row in data["smaller"]) == len(codes)
    assert all(0 < row["after"] < row["before"] and row["source"] for row in data["smaller"])
    assert {row["operator"] for row in data["smaller"]} == {"roamc.dropout_mask.default"}
    spent = sum(row["seconds"] for key in ("dropped", "smaller") for row in data[key])
    assert spent == pytest.approx(data["plan"]["added_seconds"])
    shown = run(*asked).stdout.partition("encoded for a lower peak")[2]
    assert re.search(r"encoded +bits +storages .*\n.*bits +roamc\.drop", shown)


def test_explain_says_what_is_recomputed() -> None:
    data = json.loads(run("explain", "gpt", *SMALL, "--memory-budget", "60%", "--json").stdout)
    assert data["dropped"]
    assert data["plan"]["total_bytes"] == sum(data["plan"]["fixed_bytes"].values()) + data["plan"]["needed_bytes"]
    assert sum(row["runs"] for row in data["dropped"]) == len(data["plan"]["decisions"]["retain"]["reruns"])
    assert sum(row["seconds"] for row in data["dropped"]) == pytest.approx(data["plan"]["added_seconds"])
    assert "recomputed for a lower peak" in run("explain", "gpt", *SMALL, "--memory-budget", "60%").stdout
    said = run("explain", "gpt", *SMALL, "--memory-budget", "60%", "--memory-budget", "min", code=1).stderr
    assert "roamc plan compares several" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "gtp2"], "did you mean 'gpt2'?"),
        (["plan", "gpt", "--set", "layer=2"], "did you mean 'layers'?"),
        (["plan", "gpt", "--optimizer", "adamv"], "did you mean 'adam'?"),
        (["plan", "gpt", "--option", "ordr=program"], "did you mean 'order'?"),
        (["plan", "gpt", "--memory-budget", "lots"], "not a size"),
        (["plan", "gpt", "--memory-budget", "6"], "'6' is 6 bytes; did you mean '6GB' or '6%'?"),
        (["plan", "gpt", "--memory-budget", "6000"], "'6000' is 6000 bytes; did you mean '6000MB'?"),
        (["plan", "gpt", "--memory-budget", "500%", "--memory-budget", "min"], "'500%' is above 100%"),
        (["plan", "gpt", *SMALL, "--option", "order=none"], "unknown order"),
        (["plan", "gpt", *SMALL, "--save", "no/such/folder/plan.json"], "no/such/folder: no such folder"),
        (["explain", "nothing.py:make"], "nothing.py: no such file"),
        (["explain", "gpt", *SMALL, "--html", "no/such/folder/plan.html"], "no/such/folder: no such folder"),
        (["explain", "gpt", *SMALL, "--html", "."], "cannot write .: .: this is a folder"),
        (["plan", "gpt", *SMALL, "--save", "/proc/plan.json"], "error: cannot write /proc/plan.json"),
        (["explain", "gpt", *SMALL, "--kernels"], "--kernels needs --device cuda"),
        (["explain", "gpt", *SMALL, "--by", "modul"], "--by modul; did you mean 'module'? Choices: module, line, kind"),
        (["plan", "gpt", *SMALL, "--option", "disable=reoder"], "did you mean 'reorder'?"),
        (["layout", "nothing.csv"], "nothing.csv: no such file"),
        (["layout", "nothing.csv", "--output", "no/such/folder/out.csv"], "no/such/folder: no such folder"),
    ],
)
def test_error_is_one_line_and_exit_code_one(arguments: list[str], said: str) -> None:
    result = run(*arguments, code=1)
    assert said in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    "arguments", [["paln"], ["plan"], ["plan", ""], ["plan", "gpt", "--bach", "3"], ["plan", "gpt", "--seq", "x"]]
)
def test_mistyped_command_is_an_error_not_a_plan_that_does_not_fit(arguments: list[str]) -> None:
    run(*arguments, code=1)


def test_function_of_a_file(file: str) -> None:
    data = json.loads(run("plan", f"{file}:make", "--width", "16", "--meta", "--json").stdout)
    assert data["name"] == "make"
    assert data["fixed_bytes"]["parameter"] == (16 * 4 + 4) * 4


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("mak", "mine.py has no function 'mak'; did you mean 'make'? Its functions: make, fails, two, "),
        ("xyz", "mine.py has no function 'xyz'. Its functions: make, fails, "),
        ("fails", "mine.py:9: ValueError: no such luck (--debug shows the traceback)"),
        ("narrow", "mine.py:19: RuntimeError: "),
        ("two", "error: the model is called as Linear(..., ...), which does not fit: too many positional arguments"),
        ("scalar", "scalar tensor, not one of shape (2, 2)"),
        ("ends", "mine.py:ends ends Python, with exit code 0, in the place of returning a model"),
        ("nothing", "error: nothing: the model has no parameters, and a step would change nothing"),
    ],
)
def test_fault_of_a_file_is_one_line(file: str, function: str, said: str) -> None:
    result = run("plan", f"{file}:{function}", code=1)
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_gradients_of_outputs_that_a_plan_assumes_are_named_with_the_way_out(file: str) -> None:
    assumed = (
        "forward and backward of output['logits'], with its gradient of 262.1 kB handed in, as torch.compile has it; "
        "for the loss alone give a loss_fn, such as lambda m, **b: m(**b).loss"
    )
    asked = ("plan", f"{file}:classifier", "--forward-backward")
    said = run(*asked, "--memory-budget", "1kB", code=2).stderr
    assert re.search(r"largest storages .*tangents_2 \(the gradient of output\['logits'\]\) 262\.1 kB", said)
    assert f"; {assumed}. Raise the budget" in said
    assert assumed in json.loads(run(*asked, "--json").stdout)["notes"]
    for talks in ("talks", "classifier"):
        assert "handed in" not in run("plan", f"{file}:{talks}").stdout


def test_what_a_file_prints_is_no_part_of_the_answer(file: str) -> None:
    result = run("plan", f"{file}:talks", "--json")
    assert json.loads(result.stdout)["name"] == "talks"
    assert result.stderr == "a word of the function\nand of its loss\n"


def test_a_function_of_a_file_may_import_what_lies_beside_it(file: str) -> None:
    Path(file).with_name("neighbour.py").write_text("import torch\nmodel = torch.nn.Linear(2, 2)\n")
    Path(file).with_name("beside.py").write_text("def loss(model, x):\n    return model(x).sum()\n")
    run("plan", f"{file}:imports")


def test_syntax_error_of_a_file_names_its_own_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import torch\n\ndef make(:\n    pass\n")
    assert run("plan", f"{path}:make", code=1).stderr == "error: broken.py:3: invalid syntax\n"


def test_name_of_a_file_that_is_no_function_is_said_to_be_none(tmp_path: Path) -> None:
    path = tmp_path / "numbers.py"
    path.write_text("batch = 3\n")
    assert run("plan", f"{path}:batch", code=1).stderr == f"error: {path}: 'batch' is an int, not a function\n"


@pytest.mark.parametrize("limit", ["-1", "0", "nan"])
def test_limit_of_clipping_is_checked(limit: str) -> None:
    said = run("plan", "gpt", *SMALL, "--clip-grad-norm", limit, code=1).stderr
    assert said == f"error: clip_grad_norm must be a positive number, not {float(limit)}\n"


def test_options_that_exclude_each_other_are_refused() -> None:
    said = run("explain", "gpt", *SMALL, "--source", "--graph", code=1).stderr
    assert said == "error: --source and --graph print one text each: give one of them\n"
    said = run("plan", "gpt", *SMALL, "--forward-backward", "--clip-grad-norm", "1", code=1).stderr
    assert said.startswith("error: --clip-grad-norm is part of the update")


def test_a_reader_that_has_read_enough_is_no_error() -> None:
    command = [sys.executable, "-m", "roamc", "models"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""


def test_debug_shows_the_traceback(file: str) -> None:
    assert "Traceback" in run("plan", f"{file}:fails", "--debug", code=1).stderr


@pytest.mark.parametrize("by", ["module", "line", "kind"])
def test_explain_sums_up_by(by: str) -> None:
    data = json.loads(run("explain", "gpt", *SMALL, "--no-curve", "--json", "--by", by).stdout)["eager"]
    assert sum(group["nbytes"] for group in data["groups"]) <= data["live_bytes"]
    assert all(storage["module"] for storage in data["storages"])
    assert {key for key in ("module", "source") if any(group[key] for group in data["groups"])} == {
        "module": {"module"}, "line": {"source"}, "kind": set()
    }[by]  # fmt: skip


def test_explain_gives_json() -> None:
    data = json.loads(run("explain", "gpt", *SMALL, "--json", "--top", "2", "--source").stdout)
    assert len(data["planned"]["storages"]) == 2
    compile(data["source"], "program", "exec")


def test_source_alone_is_a_program_and_plans_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "trace", lambda *_: pytest.fail("the curve was planned"))
    compile(run("explain", "gpt", *SMALL, "--source").stdout, "program", "exec")


def test_graph_alone_is_its_text_and_plans_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "trace", lambda *_: pytest.fail("the curve was planned"))
    lines = run("explain", "gpt", *SMALL, "--graph").stdout.splitlines()
    assert [line for line in lines if line[0] != " "][1:] == ["inputs", "operators", "outputs", "storages"]
    data = json.loads(run("explain", "gpt", *SMALL, "--graph", "--json").stdout)
    assert data["graph"].splitlines() == lines
    assert data["plan"]["peak_bytes"] > 0


def test_graph_and_source_are_one_file_each(tmp_path: Path) -> None:
    path = tmp_path / "graph.graphml"
    result = run("explain", "gpt", *SMALL, "--source", "--graphml", str(path))
    compile(result.stdout, "program", "exec")
    assert networkx.read_graphml(path).number_of_edges() > 100
    assert "the graph is in" in run("explain", "gpt", *SMALL, "--no-curve", "--graphml", str(path)).stdout
    assert "no such folder" in run("explain", "gpt", "--graphml", str(tmp_path / "no" / "x.graphml"), code=1).stderr


def test_explain_prints_and_draws_a_page(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    result = run("explain", "gpt", *SMALL, "--html", str(path))
    assert "peak of eager PyTorch" in result.stdout
    assert result.stdout.endswith(f"the picture is in {path}\n")
    assert path.read_text("utf-8").startswith("<!doctype html>")


def test_json_is_the_same_with_a_page(tmp_path: Path) -> None:
    plain, drawn = (
        json.loads(run("explain", "gpt", *SMALL, "--json", *more).stdout)
        for more in ([], ["--html", str(tmp_path / "plan.html")])
    )
    del plain["plan"]["seconds"], drawn["plan"]["seconds"]
    assert plain == drawn
    assert (tmp_path / "plan.html").stat().st_size > 10_000


def test_no_page_is_left_of_a_plan_that_does_not_fit(tmp_path: Path) -> None:
    run("explain", "gpt", *SMALL, "--memory-budget", "1kB", "--html", str(tmp_path / "plan.html"), code=2)
    assert list(tmp_path.iterdir()) == []


def test_models_are_listed() -> None:
    assert "gpt2-xl" in run("models").stdout
    assert json.loads(run("models", "--json").stdout)["gpt"]["settings"]["layers"] == 6


def test_calibrate_stores_prints_and_gives_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roamc.cost.profile.measured_folder", lambda: tmp_path / "cache")
    result = run("calibrate", "--quick")
    assert "matmul" in result.stdout
    assert load_profile("cpu").name == "measured"
    path = tmp_path / "mine.json"
    printed = run("calibrate", "--quick", "--output", str(path), "--json").stdout
    assert path.read_text("utf-8") == printed
    assert load_profile(profile=str(path)).device == "cpu"


@pytest.mark.parametrize(("load", "said"), [(100.0, "busy here, with a load average of 100.0 on "), (0.0, "")])
def test_calibrate_says_that_the_machine_is_busy(
    load: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    error = run("calibrate", "--quick", "--output", str(tmp_path / "mine.json")).stderr
    assert said in error
    assert ("may be too slow" in error) == bool(said)


def test_solvers_are_compiled_at_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled._process, "patience", 1.0)
    assert run("warm-up").stdout.startswith("the solvers are compiled")
    assert compiled._process.patience == 0.0, "nothing is interpreted any more"


def test_warm_up_says_why_the_machine_code_that_came_with_roamc_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roamc.solvers.warm_up.warm_up", lambda: None)
    for reason, end in (("", ""), ("no file", "; the machine code that came with roamc is not used: no file")):
        monkeypatch.setattr("roamc.solvers.compiled.compiling.reason", reason)
        assert run("warm-up").stdout == f"the solvers are compiled{end}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--device", "gpu"], "no device is called"), (["--output", "no/such/x"], "no/such: no such folder")],
)
def test_calibration_that_cannot_be_is_one_line(arguments: list[str], said: str) -> None:
    assert said in run("calibrate", "--quick", *arguments, code=1).stderr


DEMO = ["--batch", "2", "--seq", "16", "--layers", "1", "--width", "32", "--heads", "4", "--memory-budget", "90%"]


def test_demo_measures_all_sides() -> None:
    data = json.loads(run("demo", "--steps", "3", *DEMO, "--json").stdout)
    assert data["bit_equal"] is True
    assert data["losses"]["eager"] == data["losses"]["roamc"] == data["losses"]["roamc, budget"]
    assert len(data["step_seconds"]["eager"]) == 3
    assert data["time_ratio"]["roamc"] > 0
    measured = data["measured_peak_bytes"]
    assert measured["eager"] > 0
    for side in ("roamc", "roamc, budget"):
        plan = data["plans"][side]
        # The arena, and all that the plan puts beside it, is in the measured peak; on top comes operators' workspace.
        assert plan["arena_bytes"] <= measured[side]
        assert plan["bound_bytes"] <= measured[side] < 1.5 * plan["peak_bytes"]
        assert plan["fragmentation"] >= 0
        assert set(plan["seconds"]) >= {"capture", "reorder", "layout", "verify", "emit"}
    assert data["plans"]["roamc"]["budget_bytes"] is None
    assert data["plans"]["roamc, budget"]["needed_bytes"] <= data["plans"]["roamc, budget"]["budget_bytes"]


def test_demo_prints_losses_memory_and_time() -> None:
    result = run("demo", "--steps", "2", *DEMO)
    said = ("all 2 losses are equal bit for bit", "roamc at 90%", "measured peak", "lower bound", "too few steps")
    for expected in (*said, "planning", 'memory_budget="90%"'):
        assert expected in result.stdout


@pytest.mark.thorough
def test_demo_whose_budget_no_plan_keeps_ends_with_two() -> None:
    assert "BudgetError: GPT needs" in run("demo", "--steps", "1", *DEMO, "--memory-budget", "1kB", code=2).stderr


def test_demo_says_which_side_failed() -> None:
    with pytest.raises(RoamcError, match="'eager' side of the demo failed: OptionError"):
        race(Task("eager", steps=1, batch=1, seq=8, layers=1, width=10, heads=4))


def test_demo_reads_the_same_text_every_time() -> None:
    assert text.read(200_000) == text.read(200_000)
    first, second = (text.batches(text.read(200_000), 2, 3, 8, seed=1) for _ in range(2))
    for (tokens, targets), (others, _) in zip(first, second, strict=True):
        assert tokens.shape == (3, 8)
        assert tokens.equal(others)
        assert tokens[:, 1:].equal(targets[:, :-1])


def test_result_counts_equal_steps_and_takes_the_median_of_pairs() -> None:
    result = Result(
        task=Task("eager", 5, 1, 1, 1, 1, 1),
        parameters=1,
        threads=1,
        losses={
            "eager": [1.0, 2.0, 3.0, 4.0, 5.0],
            "roamc": [1.0, 2.0, 3.0, 4.0, 5.5],
            "roamc, budget": [1.0, 2.0, 3.0, 4.5, 5.0],
        },
        seconds={
            "eager": [9.0, 9.0, 1.0, 2.0, 4.0],
            "roamc": [99.0, 99.0, 2.0, 2.0, 2.0],
            "roamc, budget": [99.0, 99.0, 2.0, 4.0, 8.0],
        },
        peak_bytes={"eager": 100, "roamc": 50, "roamc, budget": 25},
        plans={"roamc": {}, "roamc, budget": {}},
        total_seconds=1.0,
    )
    assert result.equal_steps == 3
    assert (result.time_ratio("roamc"), result.time_ratio("roamc, budget")) == (1.0, 2.0)
    assert (result.memory_ratio("roamc"), result.memory_ratio("roamc, budget")) == (0.5, 0.25)
    assert result.to_dict()["bit_equal"] is False
