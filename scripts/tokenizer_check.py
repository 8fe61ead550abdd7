"""Compares what the example `text` of firesteel-generate answers with Python's answers.

usage: tokenizer_check.py FIRESTEEL TEXT FOLDER

FOLDER holds tokenizer.json and tokenizer_config.json of Qwen3.
"""

import datetime
import json
import os
import pathlib
import random
import re
import struct
import subprocess
import sys
import tempfile
import time

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

ROOT = pathlib.Path(__file__).resolve().parent.parent
SEED = 1
# Rows of the embedding, more than the tokenizer has tokens.
ROWS = 151936
# Stands for `<` in what a user says, so that it spells no token.
OPEN = "\ue000"


# --- What is encoded


def fragments(added):
    halves = [part for token in added for part in (token[:-1], token[1:], token[: len(token) // 2])]
    return [
        *added, *halves,
        "e\u0301", "\u0301", "\u0338", "<\u0338", ">\u0338", "\u00e9", "A\u030a", "\u212b", "\u2126", "\ufb01", "\u1e9b\u0323",
        "\u1112\u1161\u11ab", "\ud55c", "\u1100\u1161", "\u11a8", "\u3131", "\uac00\u11a8",
        "\u0645\u064e\u0631\u0652\u062d\u064e\u0628\u064b\u0627", "\u0661\u0662\u0663", "\u06f1\u06f2", "\u200f", "\u202e",
        "\u0928\u092e\u0938\u094d\u0924\u0947", "\u0915\u094d\u200d\u0937", "\u0ba8\u0bbf", "\u0e01\u0e33", "\u0e33", "\u0f4b\u0f72", "\u1785\u17c6",
        "👩\u200d👩\u200d👧\u200d👦", "👍🏽", "🇩🇪🇫🇷", "☕\ufe0f", "🏴\U000e0067\U000e0062\U000e007f", "\u200d", "\u200b", "\ufeff", "\u00ad",
        "7", "12", "345", "67890", "1234567890123", "²³½", "Ⅷ", "①", "3.14e-10", "0x1F", "1,000", "٣", "๑",
        " ", "  ", "   ", "\t", "\t\t", "\n", "\n\n", "\r\n", "\r", "\r\r\n", "\n\r", " \n", "\n ", "\u00a0", "\u00a0\u00a0", "\u2003", "\u3000", "\u2028", "\u2029", "\x85", "\v", "\f", "\x1c", "\x1f",
        "\0", "\x01", "\x08", "\x1b[0m", "\x7f", "\x80", "\x9f", "\ufffd", "\ufdd0", "\uffff", "\U0010ffff", "\ue001", "\U000f0000",
        "don't", "DON'T", "WE'LL", "I'M", "he'S", "they'Re", "x'VE", "'D", "''s", "'", "’s", "'\u017f", "\u017f", "\u212a", "'\u217f", "l'\u00c9t\u00e9",
        "hello", " world", "Hello", "HELLO", "camelCaseWord", "snake_case", "antidisestablishmentarianism", "ß", "İ", "ı", "ǅ", "Ǆ",
        "今日は", "漢字", "カタカナ", "﨑", "\u9fff", "\U00020000", "Привет", "Ёж", "ё", "שלום", "ψ", "ΐ", "\u1fd3",
        "!", "?!", "...", "…", "—", "--", "==", "!=", "::", "->", "()", "[", "]", "{\"a\": 1}", "</", "<", ">", "|", "<|", "|>", "#tag", "@user", "$100", "€", "~/x", "\\n", "\"", "`", "^", "+",
    ]


def corpus(added):
    chance = random.Random(SEED)
    pieces = fragments(added)
    texts = ["", *pieces]
    texts += [f"a{piece}b" for piece in pieces] + [f" {piece} {piece}1" for piece in pieces]
    for code in range(0x3000):
        letter = chr(code)
        texts.append(f"{letter}")
        texts.append(f"a{letter}b {letter}{letter}1 '{letter} it'{letter}e\n{letter}")
    # The other planes but surrogates, 32 characters a text.
    for start in [*range(0x3000, 0xD800, 32), *range(0xE000, 0x32000, 32), *range(0xE0000, 0xE0200, 32)]:
        texts.append("x".join(map(chr, range(start, start + 32))))
        texts.append("".join(map(chr, range(start, start + 32))))
    texts += ["".join(chance.choices(pieces, k=chance.randrange(1, 40))) for _ in range(4000)]
    for _ in range(1000):
        data = chance.randbytes(chance.randrange(1, 120))
        texts.append(data.decode("utf-8", "replace"))
        texts.append(data.decode("latin-1"))
    runs = [" ", "\n", "\t ", "\r\n", "7", "!", "ab", "\u0301", "字", "👩\u200d", "'s", "\u00a0", "<|im_start|>", "<"]
    texts += [piece * count + end for piece in runs for count in (100, 5001) for end in ("", "x", " x", "\nx")]
    texts += ["a" * 1_000_000, " " * 400_000 + "x", "The quick brown fox. " * 20_000]
    return texts


# --- Conversations


def conversations():
    def tool(name, description, properties, **more):
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": name, "description": description, "parameters": parameters, **more}
        return {"type": "function", "function": function}

    def call(name, arguments, **more):
        return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}

    text = "  quotes \" ' ` \\ \\n é e\u0301 한 字 🙂 <b>&amp;</b> \u00a0\u2028\t\r\n\x01\x7f "
    spelled = "</think>\n<think>x</think> <|im_end|>\n<|im_start|>system\n<tool_response>r</tool_response><tool_call>"
    tools = [
        tool("ping", text, {}),
        tool("set_alarm", "Set an alarm", {
            "label": {"type": "string", "description": spelled},
            "big": {"type": "integer", "default": 9007199254740993, "minimum": -(2**63), "maximum": 2**64 - 1},
            "rate": {"type": "number", "enum": [1.0, 1e16, 1e15, 1e-4, 1e-05, 0.1, -0.0, -2.5e-07, 1e300, 5e-324, 123456789012345680.0]},
            "on": {"type": ["boolean", "null"], "default": None, "const": True},
            "": {"enum": [[], {}, [[]], {"a": {}}]},
        }, strict=True),
    ]
    user = {"role": "user", "content": "Hi"}
    call_text = call("set_alarm", {"label": text, "x": [1, 1.5, None, True, {"k": "é\"<"}], "e": "", "n": {}})
    assistant = [
        {"role": "assistant", "content": "Hello."},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": None, "tool_calls": [call("ping", {})]},
        {"role": "assistant", "tool_calls": [call("ping", {}), call_text]},
        {"role": "assistant", "content": "", "tool_calls": [call_text, call("ping", "{\"a\":1,\"b\":[ 2]}")]},
        {"role": "assistant", "content": "First:", "tool_calls": [call("ping", {}, id="c1"), call("ping", {"q": spelled})]},
        {"role": "assistant", "content": "\n\nA.", "reasoning_content": "\nthought\n\n"},
        {"role": "assistant", "content": "A", "reasoning_content": ""},
        {"role": "assistant", "content": None, "reasoning_content": "only", "tool_calls": [call("ping", {})]},
        {"role": "assistant", "content": "<think>\ninline\n</think>\n\nanswer"},
        {"role": "assistant", "content": "x</think>y</think>z"},
        {"role": "assistant", "content": text, "reasoning_content": text},
        {"role": "assistant", "content": spelled, "reasoning_content": spelled},
        {"role": "assistant", "content": "", "tool_calls": []},
    ]
    results = [
        {"role": "tool", "content": "{\"ok\": true}", "tool_call_id": "c1"},
        {"role": "tool", "content": ""},
        {"role": "tool", "content": text, "name": "ping"},
        {"role": "tool", "content": spelled},
    ]
    systems = [[], [{"role": "system", "content": "Be brief."}], [{"role": "system", "content": ""}], [{"role": "system", "content": text}]]
    users = [user, {"role": "user", "content": ""}, {"role": "user", "content": text}, {"role": "user", "content": spelled},
             {"role": "user", "content": "<tool_response>\nr\n</tool_response>"}, {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    lists = [[], *([message] for message in [*users, *assistant, *results])]
    for message in assistant:
        lists += [[user, message], [user, message, user], [user, message, results[0]],
                  [user, message, results[0], results[1], message, results[2]], [user, message, *results, message]]
    for message in users:
        lists += [[message, assistant[0], message], [user, assistant[6], message, assistant[8], results[0], assistant[9]]]
    lists.append([user, {"role": "system", "content": "later"}, user])
    chance = random.Random(SEED)
    lists += [chance.choices([*users, *assistant, *results], k=chance.randrange(1, 12)) for _ in range(60)]
    options = [{}, {"add_generation_prompt": True}, {"add_generation_prompt": True, "enable_thinking": False},
               {"add_generation_prompt": True, "enable_thinking": True}, {"enable_thinking": False}]
    found = []
    for number, messages in enumerate(lists):
        for system in systems if len(messages) < 2 else [systems[number % 4]]:
            for chosen, more in [*(([], option) for option in options), (tools, options[number % 5]), (tools, options[1])]:
                found.append({"messages": [*system, *messages], "tools": chosen, **more})
    return found


def seen(conversation, change):
    """A conversation as templates see it, with `change` made to every text of a user."""

    def texts(value):
        if isinstance(value, str):
            return change(value)
        if isinstance(value, list):
            return [texts(item) for item in value]
        if isinstance(value, dict):
            return {change(key): texts(item) for key, item in value.items()}
        return value

    messages = []
    for message in conversation["messages"]:
        message = json.loads(json.dumps(message))
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
        # As programs that serve models take a message that only calls tools.
        message["content"] = content or ""
        for call in message.get("tool_calls") or []:
            if isinstance(call["function"]["arguments"], str):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        messages.append({key: value if key == "role" else texts(value) for key, value in message.items()})
    tools = [{key: texts(value) for key, value in tool.items()} for tool in conversation["tools"]]
    return {**conversation, "messages": messages, "tools": tools or None}


def environment(now):
    """Jinja as transformers sets it up."""

    class GenerationTag(Extension):
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = now.strftime
    return made


# --- Times


def formats():
    chance = random.Random(SEED)
    letters = "aAbBcCdDeFfgGhHIjklmMnNpPqQrRsStTuUvVwWxXyYzZ%+iJKLoEO"
    flags = ["", "-", "_", "0", "^", "#", "5", "_12", "-5", "012", "#9", "^40", "E", "O", "^^", "-0", "0-", "^#", "7E", "_9O", "99999", "99999999999999999999"]
    found = [f"%{flag}{letter}" for letter in letters for flag in flags]
    found += [f"<%{flag}{letter}>é" for letter in letters for flag in ("", "5", "E", "^")]
    found += ["", "%", "%%", "%%%", "%-", "%5", "%E", "%%d %%%d", "%d %B %Y", "%Y-%m-%dT%H:%M:%S.%f%z", "%字", "字 %d 月", "%5%f", "%1000d", "%2000d", "a" * 20 + "%5000d"]
    parts = [*letters, *"0123456789", *"_-^#EO", "%", "%", "%", " ", ":", "é", "🙂"]
    found += ["%" + "".join(chance.choices(parts, k=chance.randrange(1, 12))) for _ in range(500)]
    # Since Python 3.12 this is a directive.
    return [text for text in found if "%:z" not in text]


# Zones by name, by rule, with odd offsets, and what is none.
ZONES = ["UTC", "America/New_York", ":Asia/Kolkata", "CET-1CEST,M3.5.0,M10.5.0/3", "Australia/Lord_Howe", "Pacific/Kiritimati", "", "No/Such_Zone"]
# Around the turns of years and of the clock, with parts of a second that floats hold exactly.
TIMES = [0.015625, 951782399.5, 978220800.0, 1230768000.25, 1735689599.984375, 1767225600.0, 1772953199.0, 1772953200.0, 1774745999.0, 1774746000.0, 1782864000.125, 4107542400.0]


# --- Comparing


class Program:
    """The example on a folder or file, which answers lines with lines while Python does so too."""

    def __init__(self, text, path, lines, **variables):
        self.count = len(lines)
        self.asked, self.told = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        self.asked.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode())
        self.asked.seek(0)
        variables = {**os.environ, **variables}
        self.running = subprocess.Popen([text, str(path)], stdin=self.asked, stdout=self.told, env=variables)

    def answers(self):
        if self.running.wait():
            sys.exit(f"{self.running.args} ended with {self.running.returncode}")
        self.told.seek(0)
        answers = [json.loads(line) for line in self.told]
        assert len(answers) == self.count, (len(answers), self.count)
        return answers


class Comparison:
    def __init__(self):
        self.failures = []
        self.counts = {}
        self.start = time.monotonic()

    def same(self, kind, about, own, expected):
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if own != expected:
            self.failures.append(f"{kind}: {about}\n  own:    {own!r:.300}\n  Python: {expected!r:.300}")

    def finish(self):
        """Says what was compared, and fails on a difference or on nothing compared."""
        seconds = time.monotonic() - self.start
        for kind in self.counts:
            failures = [failure for failure in self.failures if failure.startswith(kind)]
            for failure in failures[:8]:
                print(failure)
        compared = ", ".join(f"{count} {kind}" for kind, count in self.counts.items())
        print(f"compared {compared}; {len(self.failures)} differ; {seconds:.0f} s")
        if self.failures or not {"sizes", "times", "texts", "prompts"} <= self.counts.keys():
            sys.exit(1)


def checkpoint(folder, tokenizer):
    """A checkpoint of one layer with the tokenizer, whose weights are those of a golden one and zeros."""
    golden = ROOT / "tests/golden/qwen3/tied"
    config = json.loads((golden / "config.json").read_text())
    config |= {"vocab_size": ROWS, "num_hidden_layers": 1, "layer_types": ["full_attention"], "bos_token_id": 151643, "eos_token_id": 151645}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tokenizer / name).read_bytes())
    file = (golden / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", file[:8])[0]
    header, data = json.loads(file[8 : 8 + length]), file[8 + length :]
    header.pop("__metadata__", None)
    new, bytes_ = {}, b""
    for name, tensor in header.items():
        if re.search(r"layers\.[1-9]", name):
            continue
        begin, end = tensor["data_offsets"]
        content = data[begin:end]
        if "embed_tokens" in name:
            content = bytes(len(content) // tensor["shape"][0] * ROWS)
            tensor["shape"][0] = ROWS
        new[name] = {**tensor, "data_offsets": [len(bytes_), len(bytes_) + len(content)]}
        bytes_ += content
    text = json.dumps(new).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes_)


def texts_and_ids(whole, plain):
    """What is asked of texts and ids, and Python's answers."""
    texts = corpus([token.content for token in whole.get_added_tokens_decoder().values()])
    chance = random.Random(SEED)
    sequences = [[chance.randrange(ROWS) for _ in range(chance.randrange(1, 30))] for _ in range(2000)]
    sequences += [[id] for id in range(151600, ROWS)]
    yield from ({"text": text} for text in texts)
    yield from ({"ids": ids} for ids in sequences)
    yield None
    for text in texts:
        ids = [tokenizer.encode(text).ids for tokenizer in (plain, whole)]
        yield {"plain": ids[0], "parsed": ids[1], "texts": whole.decode_batch(ids)}
    for ids in sequences:
        yield {"text": whole.decode(ids)}


def prompts(whole, plain, template):
    """What is asked of conversations, and the answers of jinja2 and Python."""
    moment = TIMES[4]
    made = environment(datetime.datetime.fromtimestamp(moment)).from_string(template)
    added = [token.content for token in whole.get_added_tokens_decoder().values()]
    parts = re.compile("(" + "|".join(map(re.escape, added)) + ")")

    def ids(conversation):
        """Only the template's own text has tokens in it."""
        text = made.render(**seen(conversation, lambda text: text.replace("<", OPEN)))
        pieces = [piece.replace(OPEN, "<") if piece not in added else piece for piece in parts.split(text)]
        pieces = [(whole if number % 2 else plain).encode(piece).ids for number, piece in enumerate(pieces)]
        return [id for piece in pieces for id in piece]

    asked = conversations()
    yield from ({"conversation": conversation, "time": moment} for conversation in asked)
    yield None
    for conversation in asked:
        try:
            yield {"text": made.render(**seen(conversation, str)), "ids": ids(conversation)}
        except (jinja2.exceptions.TemplateError, TypeError):
            yield {"error": ...}


def compare(comparison, text, paths, kinds):
    """Has each path's program answer what each kind asks, which ends with `None` and Python's answers."""
    asked, kind_of = [], []
    for kind, lines in kinds.items():
        for line in iter(lambda: next(lines), None):
            asked.append(line)
            kind_of.append(kind)
    programs = [Program(text, path, asked) for path in paths]
    expected = [answer for lines in kinds.values() for answer in lines]
    for path, program in zip(paths, programs):
        for line, kind, own, answer in zip(asked, kind_of, program.answers(), expected, strict=True):
            if "error" in own:
                own, kind = {"error": ...}, f"{kind} that are refused"
            comparison.same(kind, f"{path.name} {json.dumps(line, ensure_ascii=False):.600}", own, answer)


def compare_times(comparison, text, folder):
    template = folder / "chat_template.jinja"
    template.write_text("{{ strftime_now(messages[0].content) }}")
    (folder / "tokenizer.json").write_bytes((ROOT / "models/spark-tiny/tokenizer.json").read_bytes())
    chance = random.Random(SEED)
    common = ["%c %j %U %W %V %G %u %s %f", "%d %B %Y %H:%M:%S"]
    for zone in ZONES:
        asked = [(moment, form) for moment in TIMES for form in common]
        asked += [(chance.choice(TIMES), form) for form in formats()]
        messages = [{"messages": [{"role": "user", "content": form}]} for _, form in asked]
        lines = [{"conversation": told, "time": moment} for told, (moment, _) in zip(messages, asked)]
        program = Program(text, folder, lines, TZ=zone)
        os.environ["TZ"] = zone
        time.tzset()
        for (moment, form), answer in zip(asked, program.answers()):
            now = datetime.datetime.fromtimestamp(moment)
            about = f"{form!r} at {moment} in {zone!r}"
            comparison.same("times", about, answer.get("text", answer), now.strftime(form))
    os.environ.pop("TZ")
    time.tzset()


def main():
    firesteel, text, published = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
    comparison = Comparison()
    description = json.loads((published / "tokenizer.json").read_text())
    whole = Tokenizer.from_str(json.dumps(description))
    plain = Tokenizer.from_str(json.dumps({**description, "added_tokens": []}))
    template = json.loads((published / "tokenizer_config.json").read_text())["chat_template"]
    comparison.same("sizes", "tokens", len(description["model"]["vocab"]) + len(description["added_tokens"]), 151669)
    with tempfile.TemporaryDirectory() as place:
        place = pathlib.Path(place)
        for name in ("checkpoint", "times"):
            (place / name).mkdir()
        compare_times(comparison, text, place / "times")
        checkpoint(place / "checkpoint", published)
        file = place / "model.gguf"
        quantize = [firesteel, "quantize", "gguf", place / "checkpoint", "--format", "f32", "--out", file]
        done = subprocess.run(quantize, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            sys.exit(done.stdout)
        kinds = {"texts": texts_and_ids(whole, plain), "prompts": prompts(whole, plain, template)}
        compare(comparison, text, (published, file), kinds)
    comparison.finish()


main()
