#!/usr/bin/env python3
"""Makes calibration.txt and calibration_chats.jsonl: what spark-tiny itself says at its own temperature.

    tests/golden/spark-tiny/make_calibration.py

FIRESTEEL is the program, target/release/firesteel by default. The user's and the tools' part of a
conversation is the model's own too; one that is no well-formed conversation is left out. No text
that the model was trained or is tested on goes in, so heldout.txt and heldout_chats.jsonl stay held
out; of the latter only the tools are known here, which are the model's interface.
"""
import json
import os
import pathlib
import random
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
FIRESTEEL = os.environ.get("FIRESTEEL", ROOT / "target/release/firesteel")
TEXTS = 100
CHATS = 40
STARTS = ["The", "A", "In the", "To", "This is", "Some", "It is", "One of", "People", "When", "[from",
          "Used", "Any", "An", "Most", "See", "There", "Originally", "Also", "For"]
START, END = "<｜start▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
CALL = re.compile(r"(?:<think>(?P<think>[^<]*))?</think>(?P<content>[^<]*)"
                  r"(?:<tool_call>(?P<name>\w+)(?P<arguments>"
                  r"(?:<arg_key>\w+</arg_key><arg_value>[^<]*</arg_value>)*)</tool_call>)?")
ARGUMENT = re.compile(r"<arg_key>(\w+)</arg_key><arg_value>([^<]*)</arg_value>")


def tool(name, description, /, **properties):
    properties = {key: {"type": kind, "description": text} for key, (kind, text) in properties.items()}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    tool("get_weather", "Current weather of a city", city=("string", "city name")),
    tool("set_alarm", "Set an alarm", hour=("integer", "0 to 23"), minute=("integer", "0 to 59")),
    tool("open_app", "Open an app", name=("string", "app name")),
    tool("send_message", "Send a text message", to=("string", "person"), text=("string", "message")),
    tool("add", "Add two numbers", a=("integer", "first"), b=("integer", "second")),
    tool("add_item", "Put an item on the shopping list", item=("string", "item"), count=("integer", "how many")),
]


def generate(prompt, seed, *options):
    command = [FIRESTEEL, "generate", ROOT / "models/spark-tiny", "--prompt", prompt, "--seed", str(seed),
               "--temperature", "1", "--top-p", "0.95", "--json", *options]
    report = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return report["text"], report["stop"] == "end_of_sequence"


def text(seed):
    start = STARTS[seed % len(STARTS)]
    return start + generate(START + start, seed, "--max-tokens", "160", "--min-tokens", "160")[0]


def reply(said):
    """The message that the model's turn says, or None."""
    match = CALL.fullmatch(said)
    if match is None or bool(match["name"]) == bool(match["content"]):
        return None
    message = {"role": "assistant", "reasoning_content": match["think"] or "", "content": match["content"]}
    if match["name"]:
        value = lambda word: int(word) if re.fullmatch(r"0|-?[1-9]\d*", word) else word
        arguments = {key: value(word) for key, word in ARGUMENT.findall(match["arguments"])}
        message["tool_calls"] = [{"type": "function", "function": {"name": match["name"], "arguments": arguments}}]
    return message


def conversation(seed):
    """A conversation that the model holds with itself, or None."""
    chosen = random.Random(seed)
    tools = chosen.sample(TOOLS, chosen.randint(1, 3))
    lines = "".join("\n" + json.dumps(tool["function"]) for tool in tools)
    so_far = (f"{START}<|System|>\nyou are a helpful assistant.## Tools\nYou have access to the following "
              f"functions:\n<tools>{lines}\n</tools>{END}")
    messages = []
    for role, marker in [("user", "<|User|>"), ("assistant", "<|Bot|>"), ("tool", "<|Tool|><tool_response>"),
                         ("assistant", "<|Bot|>")]:
        if role == "tool" and not messages[-1].get("tool_calls"):
            break
        so_far += START + marker
        said, ended = generate(so_far, seed, "--max-tokens", "80")
        if not ended or not said:
            return None
        so_far += said + END
        if role == "assistant":
            message = reply(said)
        elif role == "tool":
            inner = re.fullmatch(r"([^<]+)</tool_response>", said)
            message = inner and {"role": role, "content": inner[1]}
        else:
            message = None if "<" in said else {"role": role, "content": said}
        if message is None:
            return None
        messages.append(message)
    return {"messages": messages, "tools": tools}


def main():
    (HERE / "calibration.txt").write_text("".join(text(seed) + "\n\n" for seed in range(TEXTS)))
    chats, seed = [], 0
    while len(chats) < CHATS:
        chat = conversation(seed)
        chats += [chat] if chat else []
        seed += 1
    lines = "".join(json.dumps(chat, ensure_ascii=False) + "\n" for chat in chats)
    (HERE / "calibration_chats.jsonl").write_text(lines)
    print(f"{seed - CHATS} of {seed} conversations were not well-formed", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
