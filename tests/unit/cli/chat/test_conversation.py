"""What `disagg chat` makes of each line."""

from __future__ import annotations

import pytest

from disagg.cli.chat.conversation import (
    HELP,
    PROMPT,
    PROMPT_INSIDE,
    Ask,
    Command,
    Conversation,
    Explain,
    Leave,
    Say,
)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def after(*lines: str) -> tuple[Conversation, Command | None]:
    """A conversation after these lines, and the command of the last one; answers are `A`."""
    made = Conversation("m")
    command = None
    for line in lines:
        if isinstance(command, Ask):
            made.ended("A", "r1")
        command = made.read(line)
    return made, command


def test_a_message_is_asked_after_all_earlier_ones() -> None:
    assert after("hello")[1] == Ask([user("hello")], {})
    assert after("  one ", "two")[1] == Ask([user("one"), assistant("A"), user("two")], {})


@pytest.mark.parametrize("line", ["", "   ", '""""""', '"""  """'])
def test_an_empty_line_asks_nothing(line: str) -> None:
    assert after(line)[1] is None
    assert after(line, "x")[1] == Ask([user("x")], {})


def test_a_message_of_several_lines() -> None:
    made = Conversation("m")
    assert made.prompt == PROMPT
    assert made.read('"""one') is None
    assert made.prompt == PROMPT_INSIDE
    assert made.read("  /bye") is None
    assert made.read("") is None
    assert made.read('three"""') == Ask([user("one\n  /bye\n\nthree")], {})
    assert made.prompt == PROMPT


@pytest.mark.parametrize("begin", ['"""', "/multi-line", "/multiline"])
def test_quotes_may_have_lines_of_their_own(begin: str) -> None:
    assert after(begin, "one", "two", '"""')[1] == Ask([user("one\ntwo")], {})


def test_quotes_on_one_line() -> None:
    assert after('"""/bye"""')[1] == Ask([user("/bye")], {})


def test_lines_of_a_message_that_is_not_complete_are_dropped() -> None:
    made, _ = after('"""one', "two")
    made.drop()
    assert made.prompt == PROMPT
    assert made.read("x") == Ask([user("x")], {})


def test_an_answer_that_was_stopped_stays_as_far_as_it_came() -> None:
    made, _ = after("x")
    made.ended("half")
    assert made.read("y") == Ask([user("x"), assistant("half"), user("y")], {})


def test_a_message_without_an_answer_is_taken_back() -> None:
    made, _ = after("x")
    made.ended("")
    assert made.read("y") == Ask([user("y")], {})
    assert made.read("z") == Ask([user("z")], {})  # the answer to y was cut off before it was noted


def test_an_empty_answer_that_came_whole_stays() -> None:
    made, _ = after("x")
    made.ended("", "r1")
    assert made.read("y") == Ask([user("x"), assistant(""), user("y")], {})


@pytest.mark.parametrize(
    ("line", "said", "options"),
    [
        ("/set temperature 0.5", "temperature is 0.5", {"temperature": 0.5}),
        ("/set parameter top_p 0.9", "top_p is 0.9", {"top_p": 0.9}),
        ("/set max_tokens  7", "max_tokens is 7", {"max_tokens": 7}),
        ("/set seed 18446744073709551615", "seed is 18446744073709551615", {"seed": 2**64 - 1}),
        ("/set stop a b", "stop is a b", {"stop": "a b"}),
        ("/set json_object on", "json_object is True", {"json_object": True}),
        ("/set seed default", "seed is the server's default", {}),
        ("/set max_tokens", "max_tokens: needs a value", {}),
        ("/set max_tokens 1.5", "max_tokens: expected a whole number; got '1.5'", {}),
        ("/set max_tokens -1", "max_tokens: Value out of range: -1", {}),
        ("/set temperature hot", "temperature: expected a number; got 'hot'", {}),
        ("/set json_object 1", "json_object: expected true or false; got '1'", {}),
    ],
)
def test_parameters(line: str, said: str, options: dict[str, object]) -> None:
    made, command = after(line)
    assert command == Say(said)
    assert made.read("x") == Ask([user("x")], options)  # type: ignore[arg-type]


@pytest.mark.parametrize("line", ["/set", "/set temprature 1", "/set n 2"])
def test_what_is_no_parameter(line: str) -> None:
    command = after(line)[1]
    assert isinstance(command, Say)
    assert command.text.startswith("/set PARAMETER VALUE, with one of temperature, top_p, ")


def test_a_parameter_is_set_back() -> None:
    assert after("/set seed 1", "/set top_k 2", "/set seed default", "x")[1] == Ask([user("x")], {"top_k": 2})


@pytest.mark.parametrize(
    "lines",
    [["/system be brief"], ["/set system be brief"], ['/system """be brief"""'], ['/set system """', 'be brief"""']],
)
def test_the_system_prompt_comes_first(lines: list[str]) -> None:
    made, command = after(*lines)
    assert command == Say("the system prompt is set")
    assert made.read("x") == Ask([{"role": "system", "content": "be brief"}, user("x")], {})
    made.ended("A", "r")
    assert made.read("/system") == Say("there is no system prompt")
    assert made.read("y") == Ask([user("x"), assistant("A"), user("y")], {})


def test_clear_forgets_the_messages_and_nothing_else() -> None:
    made, command = after("/system s", "/set seed 1", "x", "/clear")
    assert command == Say("the conversation begins anew")
    assert made.read("/explain") == Explain("")
    assert made.read("y") == Ask([{"role": "system", "content": "s"}, user("y")], {"seed": 1})


def test_show() -> None:
    assert after("/show")[1] == Say("model       m\nsystem      none\nparameters  the server's defaults\nmessages    0")
    assert after("/system s", "/set seed 1", "/set top_k 2", "x", "/show")[1] == Say(
        "model       m\nsystem      s\nparameters  seed 1, top_k 2\nmessages    2"
    )


def test_explain_is_of_the_last_answer_that_came_whole() -> None:
    made, command = after("/explain")
    assert command == Explain("")
    made, command = after("x", "/explain")
    assert command == Explain("r1")
    made.read("y")
    made.ended("half")
    assert made.read("/explain") == Explain("")


def test_help_names_each_command() -> None:
    command = after("/help")[1]
    assert isinstance(command, Say)
    assert len(command.text.splitlines()) == len(HELP)
    for name in ("/set", "/system", "/show", "/clear", "/explain", "/multi-line", "/help", "/bye", "/quit"):
        assert name in command.text
        assert after(name)[1] != Say(f"there is no command {name}; /help lists them")
    assert after("/?")[1] == command


@pytest.mark.parametrize("line", ["/bye", "/quit", "/exit", " /bye "])
def test_leaving(line: str) -> None:
    assert after(line)[1] == Leave()


def test_an_unknown_command_is_not_sent() -> None:
    assert after("/hlep me")[1] == Say("there is no command /hlep; /help lists them")
