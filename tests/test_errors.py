"""How errors name values and commands, and the exit codes that batch systems act on."""

import pytest

from widemix.errors import Exit, InputError, LauncherError, RunError, command, shown


def test_a_value_is_shown_in_one_line_and_cut():
    assert shown("a\n  b") == r"'a\n b'"
    assert shown([1, None]) == "[1, None]"
    assert shown(78 * "a") == f"'{78 * 'a'}'"
    assert shown(79 * "a") == f"'{79 * 'a'}..."
    assert shown(12345, most=3) == "123..."
    assert shown(10**5000) == "of the type int"


def test_a_command_is_quoted_for_a_shell():
    assert command("report", "my run", 3) == "`widemix report 'my run' 3`"


def test_exit_codes_and_what_is_no_bug():
    assert [int(code) for code in (Exit.DONE, Exit.FAILED, Exit.WRONG_INPUT, Exit.REQUEUE)] == [0, 1, 2, 75]
    assert issubclass(LauncherError, InputError)
    assert not issubclass(RunError, InputError)
    with pytest.raises(ValueError, match="no"):
        raise InputError("no")
