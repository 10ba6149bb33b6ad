"""What commands print: no character of a name or a text is obeyed by the terminal."""

from __future__ import annotations

import io
import json
import logging
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from samestep import cli, environment, log
from samestep.environment import visible
from samestep.progress import Progress
from samestep.terminal import Console

ROOT = Path(__file__).parents[3]
CONTROL = [*map(chr, [*range(9), *range(11, 32), *range(0x7F, 0xA0)])]
BIDI = [*map(chr, [*range(0x202A, 0x202F), *range(0x2066, 0x206A)])]
SEQUENCES = [
    *("\x1b[2J", "\x1b[1A\x1b[2K", "\x1b[8m", "\x1b]0;title\x07", "\x1b]52;c;ZXZpbA==\x07"),
    *("\x1b]8;;https://evil.example\x1b\\link\x1b]8;;\x1b\\", "\x1bP$q\x1b\\", "\x9b31m", "\x1bc"),
    *("ok\rerror", "abc\b\b\bxyz", "\x1b[?1049h", "\u202egpj.exe", "[red]a[/]", "[/b]", "[link=x]"),
]
ORDINARY = "naïve 日本語 हिन्दी שלום\u200f العربية\u061c e\u0301 👩‍👩‍👧 \u200bﬁ\ttab\nline"


def hostile() -> Iterator[str]:
    """Each character and sequence by itself, and 60 mixtures."""
    yield from (f"a{each}b" for each in (*CONTROL, *BIDI, *SEQUENCES))
    generator = random.Random(50)
    pieces = [*CONTROL, *BIDI, *SEQUENCES, *"az[]/é日"]
    for _ in range(60):
        yield "".join(generator.choices(pieces, k=generator.randint(1, 12)))


class Terminal(io.StringIO):
    """What a terminal has been sent."""

    def isatty(self) -> bool:
        return True


def obeyed(text: str) -> set[str]:
    return set(text) & {*CONTROL, *BIDI}


def test_no_character_of_a_text_is_obeyed_wherever_it_is_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = Terminal()
    monkeypatch.setattr(sys, "stdout", written)
    monkeypatch.setattr(sys, "stderr", written)
    environment.prepare_streams()
    handler = log._StderrHandler()
    handler.setFormatter(log._Formatter("%(message)s"))
    count = 0
    for text in hostile():
        table = Table(text, title=text, caption=Text(text))
        table.add_row(text)
        table.add_row(Text(text, style="bold"))
        console = Console(width=120)
        console.print(text, Text(text), table)
        Console(stderr=True, width=40).print(table)
        sys.stdout.write(text)
        print(text)
        sys.stderr.writelines([f"a{text}"])  # what begins with \r is a bar, see below
        handler.emit(logging.LogRecord("", logging.INFO, "", 0, "%s", (text,), None))
        count += 1
    assert obeyed(re.sub(r"\x1b\[[\d;]*m", "", written.getvalue())) == set()  # Rich's colors
    assert "[/b]" in written.getvalue()
    assert "a\\u001b[2Jb" in written.getvalue()
    assert count == 60 + len([*CONTROL, *BIDI, *SEQUENCES])


def test_only_colors_and_cursor_moves_of_rich_itself_reach_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    environment.prepare_streams()
    console = Console(stderr=True, force_terminal=True, width=200, color_system="standard")
    with Progress("work [/b]", 2, console=console) as bar:
        bar.advance()
        for text in SEQUENCES:
            sys.stderr.write(f"{text}\n")  # through Rich, above the bar
            console.print(Text(text, style="red"))
    shown = written.getvalue()
    assert "\x1b[31m" in shown
    # Nothing but colors that Rich uses, cursor moves and the cleared line.
    assert set(re.findall(r"\x1b(?!\[[\d;]*m|\[\?25[hl]|\[1A|\[2K)..", shown)) == set()
    assert "\x1b[8m" not in shown
    assert obeyed(shown) <= {"\x1b", "\r"}


def test_texts_stay_as_they_are_in_files_and_pipes_and_messages_are_escaped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "stderr", stderr)
    environment.prepare_streams()
    for text in hostile():
        stdout.seek(0)
        stdout.truncate()
        sys.stdout.write(text)
        assert stdout.getvalue() == text
        sys.stderr.write(text)
        Console(stderr=True).print(text)
    Console(width=120, highlight=False).print("a\x1b[2Jb", Text("c\x9bd"))
    assert stdout.getvalue() == f"{text}a\x1b[2Jb c\x9bd\n"
    assert obeyed(stderr.getvalue()) == set()


def test_bars_of_tqdm_redraw_their_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    environment.prepare_streams()
    tqdm = pytest.importorskip("tqdm").tqdm
    with tqdm(total=2, desc="files\x1b[2J", mininterval=0, leave=False) as first:
        with tqdm(total=2, desc="below", mininterval=0) as second:
            second.update()
        first.update()
    sys.stderr.write("end\n")
    shown = written.getvalue()
    assert re.findall(r"\r([^\s|]+):? +(\d+)%", shown)[:3] == [
        ("files\\u001b[2J:", "0"),
        ("below:", "0"),
        ("below:", "50"),
    ]
    assert "\\u000d" not in shown
    assert "\\u001b[A" not in shown
    assert shown.count("\x1b[A") == shown.count("\n\rbelow") > 0
    assert shown.endswith("\rend\n")


def test_what_is_no_bar_is_never_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    environment.prepare_streams()
    for text in ("a\rb", "\rc", "\rd\re", "f", "\rg\nh", "\ri\n", "\x1b[A"):
        sys.stderr.write(text)
    assert written.getvalue() == (
        "a\\u000db\nc\rd\\u000def\ng\nh\ni\n\\u001b[A"  # after `f` and `h`, lines begin
    )
    written.truncate(0)
    print("message", file=sys.stderr)  # two writes: the text and the line break
    for text in ("\rb", "\x1b[A", "\n", "\x1b[A\x1b[A"):
        sys.stderr.write(text)
    assert "\x1b" not in written.getvalue()


def test_ordinary_text_and_the_values_of_json_stay() -> None:
    assert visible(ORDINARY) == ORDINARY
    assert visible("a\r\nb") == "a\r\nb"
    for text in hostile():
        value = json.dumps({text: [text]}, ensure_ascii=False)
        assert json.loads(visible(value)) == {text: [text]}


@pytest.mark.parametrize("number", range(3))
def test_names_in_errors_are_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, number: int
) -> None:
    name = str(tmp_path / ["\x1b[2Ja", "\u202eb\x9b1m", "c\x1b]0;d\x07\r"][number])
    Path(name).mkdir()
    for command in (
        ["config", f"{name}/a.yaml"],
        ["data", "inspect", name],
        ["recipes", name],
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdout", io.StringIO())
            try:
                code = cli.main(command)
            except SystemExit as end:
                code = int(str(end.code))
            printed = sys.stdout.getvalue() + capsys.readouterr().err
        assert code != 0, command
        assert "Traceback" not in printed
        assert obeyed(printed) == set(), command


def test_commands_print_through_this_console_only() -> None:
    for package in ("trainer", "data_pipeline", "launch", "samestep"):
        for file in (ROOT / package).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            if re.search(
                r"from rich\.console import .*\bConsole\b|from rich import .*\bprint\b", text
            ):
                assert file.relative_to(ROOT) == Path("samestep/terminal.py")


def run(shell: str) -> tuple[list[int], str]:
    command = f'samestep() {{ "{sys.executable}" -m samestep.cli "$@"; }}; {shell}'
    command += '; echo "${PIPESTATUS[0]}" >&2'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT)
    *errors, code = done.stderr.splitlines()
    return [int(code)], "\n".join(errors)


@pytest.mark.parametrize(
    ("shell", "code"),
    [
        ("samestep --help | true", 0),
        ("samestep recipes nothing | true", 2),
        ("samestep recipes <&- >&- 2>&-", 0),
        ("samestep recipes | sleep 0", 141),
    ],
)
def test_an_output_that_nobody_reads(shell: str, code: int) -> None:
    codes, errors = run(shell)
    assert codes == [code], errors
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors


def test_a_reader_that_ends_after_the_command_has_succeeded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        monkeypatch.setattr(cli, "_parse", lambda _: Finished())
        assert cli.main([]) == 0
        monkeypatch.setattr(sys, "stdout", pipe)


class Finished:
    """A command that writes one line when its work is done."""

    verbose = traceback = False
    looks = None

    def run(self, _: object) -> int:
        sys.stdout.write("done\n")
        return 0


def test_a_terminal_that_is_gone_does_not_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    main_end, terminal = os.openpty()
    with open(terminal, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        environment.prepare_streams()
        with Progress("work", 2, console=Console(stderr=True, force_terminal=True)) as bar:
            os.close(main_end)
            bar.advance()
            time.sleep(0.3)  # it is drawn again
            sys.stderr.write("a line\n")
        Console(stderr=True).print("another")
        with suppress(OSError):
            stream.close()
