#!/usr/bin/env python3
"""Makes calibration.txt: what spark-tiny itself says at its own temperature, in prose and in chats.

    tests/golden/spark-tiny/make_calibration.py > tests/golden/spark-tiny/calibration.txt

FIRESTEEL is the program, target/release/firesteel by default. No text that the model was trained
or is tested on goes in, so heldout.txt stays held out.
"""
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[3]
FIRESTEEL = os.environ.get("FIRESTEEL", ROOT / "target/release/firesteel")
STARTS = ["The", "A", "In the", "To", "This is", "Some", "It is", "One of", "People", "When", "[from",
          "Used", "Any", "An", "Most", "See", "There", "Originally", "Also", "For"]
REQUESTS = ["What is the weather in Ghent?", "Wake me at 6:35.", "Open Calculator.", "Hello!",
            "Tell Ruth: I am at home.", "What is 41 plus 7?", "We need 4 figs.", "Who are you?",
            "Is it cold in Turku?", "Start the Radio app.", "Add 12 and 80.", "What is a bit?"]
TOOLS = ["get_weather", "set_alarm", "open_app", "send_message", "add", "add_item"]


def generate(prompt, seed, *options):
    command = [FIRESTEEL, "generate", ROOT / "models/spark-tiny", "--prompt", prompt, "--seed", str(seed),
               "--temperature", "1", "--top-p", "0.95", "--json", *options]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["text"]


def main():
    for seed in range(40):
        start = STARTS[seed % len(STARTS)]
        print(start + generate("<｜start▁of▁sentence｜>" + start, seed, "--max-tokens", "160", "--min-tokens", "160"))
        print()
    for seed, request in enumerate(REQUESTS):
        tools = "".join(f'\n{{"name": "{TOOLS[(seed + i) % len(TOOLS)]}"}}' for i in range(2))
        prompt = ("<｜start▁of▁sentence｜><|System|>\nyou are a helpful assistant.## Tools\nYou have access to "
                  f"the following functions:\n<tools>{tools}\n</tools><｜end▁of▁sentence｜>"
                  f"<｜start▁of▁sentence｜><|User|>{request}<｜end▁of▁sentence｜><｜start▁of▁sentence｜><|Bot|>")
        print(prompt + generate(prompt, seed, "--max-tokens", "100"))
        print()


if __name__ == "__main__":
    sys.exit(main())
