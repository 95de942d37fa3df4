"""Tests loading of settings: precedence, base files, overrides, and the text of errors."""

from pathlib import Path

import pytest

from megatron_async.config import build_config, load_config
from megatron_async.config.load import build_simulation, load_simulation, parse_override
from megatron_async.config.simulate import SimulateConfig, SimulationConfig
from megatron_async.errors import UserError

FILES = sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))
# Without the simulator's engines (tests/simulate) and the templates of `init`
# (tests/commands/test_init.py).
CONFIGS = [path for path in FILES if path.parent.name not in ("engines", "projects")]


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_settings_precedence_is_recipe_preset_file_command_line(tmp_path: Path) -> None:
    file = write(
        tmp_path / "c.yaml",
        "algorithm: {recipe: prime_rl}\nschedule: {max_async_level: 3, group_size: 5}\n",
    )
    assert build_config({"algorithm": {"recipe": "prime_rl"}}).schedule.max_async_level == 2
    assert load_config(file).schedule.max_async_level == 3
    config = load_config(file, ["schedule.max_async_level=7"])
    assert (config.schedule.max_async_level, config.schedule.group_size) == (7, 5)


def test_preset_of_the_file_overrides_the_preset_of_the_recipe() -> None:
    config = build_config({"algorithm": {"recipe": "copris"}, "schedule": {"preset": "pipeline"}})
    assert config.schedule.weight_update == "in_flight"


def test_settings_of_a_file_override_those_of_its_base_file(tmp_path: Path) -> None:
    write(tmp_path / "low.yaml", "name: low\nschedule: {group_size: 3, concurrency: 9}\n")
    file = write(tmp_path / "high.yaml", "base: low.yaml\nschedule: {group_size: 4}\n")
    config = load_config(file)
    assert (config.name, config.schedule.group_size, config.schedule.concurrency) == ("low", 4, 9)


def test_load_config_refuses_a_base_that_includes_itself(tmp_path: Path) -> None:
    file = write(tmp_path / "loop.yaml", "base: loop.yaml\n")
    with pytest.raises(UserError, match="nested deeper"):
        load_config(file)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["schedule.concurency=4"],
            r"unknown setting schedule\.concurency \(value 4\); did you mean schedule\.concurrency",
        ),
        (["schedule.group_size=0"], r"schedule\.group_size is 0: .*greater than or equal to 1"),
        (
            ["trainer.recompute=some"],
            r"^trainer\.recompute is 'some': input should be 'none', .* or input should be a valid",
        ),
        (["schedule.preset=fast"], r"schedule\.preset is 'fast'; it must be one of sync"),
        (["algorithm.recipe=magic"], r"algorithm\.recipe is 'magic'"),
        (["parallel.ranks=3", "parallel.tensor=2"], r"ranks 3 is not divisible by tensor 2"),
        (["parallel.sequence=true"], r"sequence is true, which requires parallel\.tensor > 1"),
        (["optimizer.lr=fast"], r"optimizer\.lr is 'fast'"),
        (["optimizer.betas=[1.5, 2]"], r"optimizer: betas must be .* less than 1, got \[1\.5, 2"),
        (
            ["sft.optimizer.min_lr=1", "sft.optimizer.schedule=cosine"],
            r"sft\.optimizer: min_lr is 1; it must not be above lr ",
        ),
        (["name=../evil"], r"name is '\.\./evil'; .* set root to create it elsewhere"),
        (["name=.."], r"name is '\.\.'; it must be the name of one directory"),
        (['name="a\\nb"'], r"it must be the name of one directory, printable"),
        ([f"name={'é' * 101}"], r"name is 'éé.* of at most 200 bytes"),
        ([f"eval.sets={{{'x' * 101}: {{path: a}}}}"], r"eval\.sets has the name .* at most 100 "),
        (["steps=yes"], r"steps is True: true and false, also yes, no"),
        (
            ["optimizer.betas=[no, 0.9]"],
            r"optimizer\.betas is \[False, 0\.9\]: true and false, also yes, no",
        ),
        (
            ["agent.command=[python, play.py, 5]"],
            r"^agent\.command\.2 is 5: .*; write it in quotes",
        ),
        (["agent.command=python play.py"], r"^agent\.command is 'py.*; write it as \[one, two\]"),
        (["sampling.max_new_tokens=99999999"], r"does not fit into engines\.max_total_tokens"),
        (["nonsense"], r"override 'nonsense' is not of the form"),
        (["schedule=4"], r"schedule must be a mapping"),
        (["environment.name=nim.py"], r"^environment\.name is '.*nim\.py'; it must be package"),
        (
            ["environment.name=games:Nim", "environment.discount=0.9"],
            r"^environment\.discount is 0\.9; .* environment\.credit 'turn', got 'episode'",
        ),
    ],
)
def test_load_config_error_names_the_setting_and_its_value(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    file = write(tmp_path / "c.yaml", "name: x\n")
    with pytest.raises(UserError, match=message) as caught:
        load_config(file, overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("section", ["environment", "agent"])
def test_section_accepts_a_plain_name(tmp_path: Path, section: str) -> None:
    file = write(tmp_path / "c.yaml", f"{section}: game.py:play\n")
    assert getattr(load_config(file), section).name == f"{tmp_path}/game.py:play"
    loaded = getattr(load_config(file, [f"{section}.arguments={{high: 3}}"]), section)
    assert (loaded.name, loaded.arguments) == (f"{tmp_path}/game.py:play", {"high": 3})
    assert getattr(load_config(file, [f"{section}=games:play"]), section).name == "games:play"


def test_overrides_keep_the_name_of_a_reward_or_loss_in_short_form(tmp_path: Path) -> None:
    file = write(tmp_path / "c.yaml", "reward: math\nalgorithm: {loss: mine:loss}\n")
    config = load_config(file, ["reward.weight=0.5", "algorithm.loss.aggregation=token_mean"])
    assert [(reward.name, reward.weight) for reward in config.reward] == [("math", 0.5)]
    assert config.algorithm.loss.name == "mine:loss"


def test_load_config_refuses_missing_invalid_and_non_mapping_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="must contain a mapping"):
        load_config(write(tmp_path / "list.yaml", "- 1\n"))
    with pytest.raises(UserError, match="not valid YAML"):
        load_config(write(tmp_path / "bad.yaml", "a: [1\n"))


def test_parse_override_suggests_quotes_when_the_value_is_not_yaml() -> None:
    text = "task.prompt_template={question} at {level}"
    with pytest.raises(UserError, match=r"is a text, quote it: 'task.prompt_template=\"TEXT\"'$"):
        parse_override(text)
    quoted = parse_override('task.prompt_template="{question} at {level}"')
    assert quoted == {"task": {"prompt_template": "{question} at {level}"}}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_shipped_config_loads(path: Path) -> None:
    simulates = path.parent.name == "simulate"
    loaded = load_simulation(path) if simulates else load_config(path)
    assert isinstance(loaded, SimulationConfig) == simulates


@pytest.mark.parametrize("overrides", [[], ["simulate.steps=5"]])
def test_section_simulate_is_refused_when_it_is_set_for_a_run(
    tmp_path: Path, overrides: list[str]
) -> None:
    file = write(tmp_path / "c.yaml", "name: x\n" if overrides else "simulate: {steps: 5}\n")
    message = "simulate is set; a run has no such section. Put it into a separate file with "
    with pytest.raises(UserError, match=message):
        load_config(file, overrides)


def test_simulation_has_the_settings_of_the_run_that_is_its_base(tmp_path: Path) -> None:
    run = write(tmp_path / "run.yaml", "sampling: {max_new_tokens: 512}\nengines: {count: 3}\n")
    text = "base: run.yaml\nsimulate: {gpu: {name: H200}}\n"
    simulation = load_simulation(write(tmp_path / "simulation.yaml", text), ["simulate.steps=7"])
    assert (simulation.engines.count, simulation.sampling.max_new_tokens) == (3, 512)
    assert (simulation.simulate.gpu.name, simulation.simulate.steps) == ("H200", 7)
    assert load_simulation(run).simulate == SimulateConfig()
    with pytest.raises(UserError, match=r"simulate\.gpu\.nme .*did you mean simulate\.gpu\.name\?"):
        load_simulation(run, ["simulate.gpu.nme=H200"])


def test_simulation_has_the_placement_of_its_run_unless_it_sets_one() -> None:
    run = {"engines": {"placement": "colocated"}, "weights": {"transport": "tensor"}}
    run |= {"schedule": {"preset": "sync"}}
    shared = build_simulation(run).simulate
    assert (shared.placement, shared.offload) == ("colocated", True)
    own = build_simulation({**run, "simulate": {"placement": "disaggregated"}}).simulate
    assert own.placement == "disaggregated"
