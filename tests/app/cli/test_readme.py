"""What the README says of commands and settings is what the program has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

from chatkv.app.cli.command import app
from chatkv.app.settings import Settings

README = (Path(__file__).parents[3] / "README.md").read_text("utf-8")
FOR_DEVELOPERS = {"check_integrity"}


def _section(title: str) -> str:
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def _first_cells(section: str) -> list[str]:
    return [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]


def test_every_setting_is_listed_and_none_that_is_not_there() -> None:
    listed = [name for cell in _first_cells(_section("Settings")) for name in re.findall("`([a-z_]+)`", cell)]
    assert len(listed) == len(set(listed))
    assert set(listed) == set(Settings.model_fields) - FOR_DEVELOPERS


@pytest.mark.parametrize("group", ["chats", "cache"])
def test_every_command_of_a_group_is_listed(group: str) -> None:
    (cell,) = (cell for cell in _first_cells(_section("Commands")) if cell.startswith(f" `chatkv {group} "))
    listed = {words.removeprefix(f"chatkv {group} ").split()[0] for words in re.findall("`([^`]+)`", cell)}
    found = typer.main.get_command(app)
    assert isinstance(found, TyperGroup)
    commands = found.commands[group]
    assert isinstance(commands, TyperGroup)
    assert listed == set(commands.commands)


def test_links_inside_the_readme_lead_somewhere() -> None:
    titles = {line.lstrip("# ").lower().replace(" ", "-") for line in README.splitlines() if line.startswith("#")}
    assert set(re.findall(r"\]\(#([^)]+)\)", README)) <= titles
