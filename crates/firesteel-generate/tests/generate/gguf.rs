//! The tokenizer and chat template of a GGUF file against those of the folder it was made from.

use firesteel_checkpoint::{Checkpoint, Gguf, GgufTokenizer};
use firesteel_generate::{
    AddedTokens, ChatTemplate, Conversation, GenerationConfig, Message, MessageRole,
    SamplingOptions, Tokenizer,
};
use firesteel_testing::{golden_path, spark_tiny_path};
use proptest::prelude::*;
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

static METADATA: LazyLock<GgufTokenizer> =
    LazyLock::new(|| Checkpoint::open(&gguf_path()).unwrap().gguf_tokenizer().unwrap().unwrap());
static FOLDER: LazyLock<Tokenizer> = LazyLock::new(|| Tokenizer::open(&spark_tiny_path()).unwrap());
static GGUF: LazyLock<Tokenizer> =
    LazyLock::new(|| Tokenizer::from_gguf(&METADATA, &gguf_path()).unwrap());

fn gguf_path() -> PathBuf {
    golden_path("llamacpp/spark-tiny-f16.gguf")
}

#[derive(Deserialize)]
struct GoldenCase {
    conversation: Conversation,
    prompt_ids: Vec<u32>,
}

#[derive(Deserialize)]
struct RenderedCase {
    template: Option<String>,
    conversation: Conversation,
    text: String,
}

/// The metadata of the golden file with `change` made to it.
fn changed(change: impl FnOnce(&mut GgufTokenizer)) -> GgufTokenizer {
    let mut metadata = METADATA.clone();
    change(&mut metadata);
    metadata
}

fn both_modes(text: &str) -> [Vec<u32>; 2] {
    [AddedTokens::AsText, AddedTokens::Parse].map(|mode| {
        let ids = GGUF.encode(text, mode).unwrap();
        assert_eq!(ids, FOLDER.encode(text, mode).unwrap(), "{text:?} {mode:?}");
        ids
    })
}

/// A GGUF file with nothing but these keys of `general.sampling`: a type and the bytes of a value.
fn sampling_file(folder: &Path, keys: &[(&str, u32, &[u8])]) -> Gguf {
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3u32.to_le_bytes());
    bytes.extend(0u64.to_le_bytes());
    bytes.extend((keys.len() as u64).to_le_bytes());
    for (name, kind, value) in keys {
        let key = format!("general.sampling.{name}");
        bytes.extend((key.len() as u64).to_le_bytes());
        bytes.extend(key.as_bytes());
        bytes.extend(kind.to_le_bytes());
        bytes.extend(*value);
    }
    let path = folder.join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    Gguf::open(&path).unwrap()
}

#[test]
fn advice_on_sampling_is_read() {
    const I32: u32 = 5;
    const F32: u32 = 6;
    const STRING: u32 = 8;
    let float = |value: f32| value.to_le_bytes();
    let folder = tempfile::tempdir().unwrap();
    let read = |keys: &[(&str, u32, &[u8])]| {
        GenerationConfig::from_gguf(&sampling_file(folder.path(), keys))
            .map(|config| (config.sampling, config.unsupported))
            .map_err(|error| error.to_string())
    };
    let greedy = SamplingOptions::GREEDY;
    assert_eq!(read(&[]), Ok((greedy.clone(), vec![])));
    let all = read(&[
        ("temp", F32, &float(0.7)),
        ("top_k", I32, &40i32.to_le_bytes()),
        ("top_p", F32, &float(0.9)),
        ("min_p", F32, &float(0.05)),
        ("penalty_repeat", F32, &float(1.1)),
        ("penalty_last_n", I32, &64i32.to_le_bytes()),
        ("mirostat", I32, &0i32.to_le_bytes()),
        ("xtc_probability", F32, &float(0.5)),
    ]);
    let expected = SamplingOptions {
        temperature: 0.7,
        top_k: 40,
        top_p: 0.9,
        min_p: 0.05,
        repetition_penalty: 1.1,
        ..greedy.clone()
    };
    let unsupported = ["xtc_probability = 0.5", "penalty_last_n = 64"];
    let unsupported = unsupported.map(|setting| format!("general.sampling.{setting}")).to_vec();
    assert_eq!(all, Ok((expected, unsupported)));
    // Every id is kept, at the temperature that transformers takes.
    let warm = SamplingOptions { temperature: 1.0, ..greedy.clone() };
    assert_eq!(read(&[("top_k", I32, &(-1i32).to_le_bytes())]), Ok((warm, vec![])));
    // A penalty alone does not sample, and what it does not act on needs no warning.
    assert_eq!(read(&[("penalty_last_n", I32, &64i32.to_le_bytes())]), Ok((greedy, vec![])));
    let text = [&1u64.to_le_bytes()[..], b"1"].concat();
    let error = read(&[("temp", STRING, &text)]).unwrap_err();
    let path = folder.path().join("model.gguf");
    assert_eq!(
        error,
        format!(
            "{}: general.sampling.temp is String(\"1\"), but a number is accepted",
            path.display()
        )
    );
}

#[test]
fn texts_encode_as_with_the_folder() {
    let texts = [
        "",
        " ",
        "The hacker's jargon: 1234567890, 3.14e-10 and x²+y³=½.\n\n  \tindented\r\n",
        "don't can't WE'LL #hashtag @user $100 (a)[b]{c} foo_bar::<Baz>() != ~/.config",
        "Fünf große Äpfel für 12,50 € – „gut“, sagte sie.",
        "C'est l'été à Besançon, où naïveté et cœur s'unissent.",
        "Привет, мир! Ёжик съел 42 яблока.",
        "今日は良い天気ですね。カタカナ、ひらがな、漢字123。",
        "人工智能的发展,2024年有3个突破。",
        "안녕하세요 세계",
        "שלום עולם, مرحبا بالعالم ١٢٣٤",
        "नमस्ते दुनिया, สวัสดีชาวโลก ๑๒๓",
        "🦀 👩‍👩‍👧‍👦 🇩🇪 👍🏽 ☕️ and e\u{301} \u{200b}\u{feff}\u{a0}x",
        "<|User|>Hi</s><think> a </think><｜end▁of▁sentence｜><tool_call>f<arg_key>k</arg_key>",
        "< |Bot|> <|Bot|<|Bot|>> <｜▁pad▁｜><unk><unk",
        "\0\u{1}\u{7f}\u{80}\u{fffd}\u{10ffff}",
        "{\"name\": \"open_app\", \"arguments\": {\"count\": 3}}",
    ];
    for text in texts {
        let [plain, parsed] = both_modes(text);
        assert_eq!(GGUF.decode(&plain), text);
        assert_eq!(GGUF.decode(&parsed), FOLDER.decode(&parsed));
        assert_eq!(GGUF.bad_word("x").unwrap(), FOLDER.bad_word("x").unwrap());
    }
    let spelled = |ids: &[u32]| ids.iter().filter(|&&id| GGUF.is_added(id)).count();
    let [plain, parsed] = both_modes(texts[13]);
    assert_eq!((spelled(&plain), spelled(&parsed)), (0, 7));
}

#[test]
fn every_id_is_the_same() {
    let count = 2060;
    for id in 0..count {
        assert_eq!(GGUF.has_token(id), FOLDER.has_token(id), "{id}");
        assert_eq!(GGUF.is_added(id), FOLDER.is_added(id), "{id}");
        assert_eq!(GGUF.token_bytes(id), FOLDER.token_bytes(id), "{id}");
        // Special tokens have no text.
        assert_eq!(GGUF.decode(&[id]), FOLDER.decode(&[id]), "{id}");
    }
    let count = count as usize;
    assert_eq!(GGUF.allowed_ids(count), FOLDER.allowed_ids(count));
    assert_eq!(GGUF.eos_token_id(), Some(1));
    let greedy = GenerationConfig { eos_token_ids: vec![1], ..GenerationConfig::default() };
    assert_eq!(GGUF.generation_config(), &greedy);
    for text in ["<|Bot|>", "Ġ", "nothing"] {
        assert_eq!(GGUF.token_id(text), FOLDER.token_id(text), "{text}");
    }
}

#[test]
fn conversations_encode_to_the_golden_ids() {
    let template = ChatTemplate::from_gguf(&METADATA, &gguf_path()).unwrap();
    let golden: Vec<GoldenCase> =
        serde_json::from_str(include_str!("../data/chat_golden.json")).unwrap();
    for case in golden {
        assert_eq!(template.encode(&case.conversation, &GGUF).unwrap(), case.prompt_ids);
    }
    let rendered: Vec<RenderedCase> =
        serde_json::from_str(include_str!("../data/rendered.json")).unwrap();
    let folder = ChatTemplate::open(&spark_tiny_path()).unwrap();
    for case in rendered.iter().filter(|case| case.template.is_none()) {
        assert_eq!(template.render(&case.conversation).unwrap(), case.text);
        let expected = folder.encode(&case.conversation, &FOLDER).unwrap();
        assert_eq!(template.encode(&case.conversation, &GGUF).unwrap(), expected);
    }
}

#[test]
fn templates_know_the_file_and_its_tokens() {
    let path = Path::new("m.gguf");
    let source = |text: &str| changed(|m| m.chat_template = Some(text.to_owned()));
    let render = |metadata: &GgufTokenizer| {
        let template = ChatTemplate::from_gguf(metadata, path).map_err(|e| e.to_string())?;
        let messages = vec![Message::text(MessageRole::User, "x")];
        let conversation = Conversation { messages, ..Conversation::default() };
        template.render(&conversation).map_err(|e| e.to_string())
    };
    let mut tokens = source("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}");
    assert_eq!(render(&tokens).unwrap(), "<｜start▁of▁sentence｜>x<｜end▁of▁sentence｜>");
    tokens.bos = None;
    assert_eq!(render(&tokens).unwrap(), "x<｜end▁of▁sentence｜>");
    tokens.eos = Some(u32::MAX);
    let cases = [
        (
            tokens,
            "m.gguf: tokenizer.ggml.eos_token_id is 4294967295, but it must be the id of a token",
        ),
        (
            changed(|m| m.chat_template = None),
            "m.gguf has no chat template: no tokenizer.chat_template in its metadata; give a plain \
             prompt instead",
        ),
        (source("\n{{ raise_exception('no') }}"), "m.gguf: tokenizer.chat_template: line 2: no"),
    ];
    for (metadata, expected) in cases {
        assert_eq!(render(&metadata).unwrap_err(), expected);
    }
    let unparsable = render(&source("\n{% if %}")).unwrap_err();
    assert!(unparsable.starts_with("m.gguf: tokenizer.chat_template: line 2: "), "{unparsable}");
}

#[test]
fn ids_of_padding_have_no_token() {
    let padded = changed(|m| {
        for _ in 0..3 {
            m.tokens.push("[PAD]".into());
            m.token_types.push(GgufTokenizer::UNUSED);
        }
        // Sparse ids: what was a token in the middle may be none.
        m.token_types[11] = GgufTokenizer::UNUSED;
    });
    let tokenizer = Tokenizer::from_gguf(&padded, Path::new("m.gguf")).unwrap();
    let mut expected = FOLDER.allowed_ids(2051);
    expected[11] = false;
    assert_eq!(tokenizer.allowed_ids(2051), expected);
    let text = "[PAD] <｜fim▁begin｜> <|Bot|> hello";
    let ids = tokenizer.encode(text, AddedTokens::Parse).unwrap();
    assert!(ids.iter().all(|&id| tokenizer.has_token(id)));
    assert!(ids.contains(&FOLDER.token_id("<|Bot|>").unwrap()));
    assert_eq!(tokenizer.decode(&ids), text);
}

#[test]
fn a_sequence_begins_as_the_file_says() {
    let tokenizer = Tokenizer::from_gguf(&changed(|m| m.add_bos = true), &gguf_path()).unwrap();
    for mode in [AddedTokens::AsText, AddedTokens::Parse] {
        for text in ["", "Hello <|Bot|>"] {
            let expected = [vec![0], FOLDER.encode(text, mode).unwrap()].concat();
            assert_eq!(tokenizer.encode(text, mode).unwrap(), expected, "{text:?} {mode:?}");
        }
    }
    // The template writes the first token itself, and a bad word is no beginning.
    let template = ChatTemplate::from_gguf(&METADATA, &gguf_path()).unwrap();
    let messages = vec![Message::text(MessageRole::User, "x")];
    let conversation = Conversation { messages, ..Conversation::default() };
    let expected = template.encode(&conversation, &FOLDER).unwrap();
    assert_eq!(template.encode(&conversation, &tokenizer).unwrap(), expected);
    assert_eq!(tokenizer.bad_word("x").unwrap(), FOLDER.bad_word("x").unwrap());
}

#[test]
fn metadata_that_cannot_be_used_is_refused() {
    type Change = fn(&mut GgufTokenizer);
    let cases: &[(Change, &str)] = &[
        (
            |m| m.model = "llama".into(),
            "model is \"llama\", but only \"gpt2\", that is byte-level BPE, is supported",
        ),
        (
            |m| m.pre = Some("llama-bpe".into()),
            "pre is \"llama-bpe\", but only \"spark2_5\" and \"qwen2\" are known; use a folder with the \
             tokenizer.json of the model",
        ),
        (
            |m| m.pre = None,
            "pre is missing, but only \"spark2_5\" and \"qwen2\" are known; use a folder with the \
             tokenizer.json of the model",
        ),
        (
            |m| m.token_types.truncate(7),
            "token_type is an array of 7, but one type for each token is needed",
        ),
        (
            |m| m.token_types[9] = 6,
            "token_type[9] is 6, but 1 (normal), 3 (control), 4 (user-defined) or 5 (unused) is \
             accepted",
        ),
        (
            |m| m.tokens[2000] = String::new(),
            "tokens[2000] is \"\", but a token has at least one character",
        ),
        (
            |m| m.tokens[13] = "y".repeat(1 << 20),
            "tokens[13] is \"yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy\"…, but \
             the added tokens may have 1 MiB of text together",
        ),
        (
            |m| m.tokens[2040] = m.tokens[3].clone(),
            "tokens[2040] is \"<think>\", as token 3 is, but no two ids may have the same token",
        ),
        (
            |m| m.token_types[14] = GgufTokenizer::UNUSED,
            "tokens is without '!' for the byte 0x21, but each byte of UTF-8 needs a token of \
             type 1",
        ),
        (
            |m| m.token_types[14] = GgufTokenizer::CONTROL,
            "tokens is without '!' for the byte 0x21, but each byte of UTF-8 needs a token of \
             type 1",
        ),
        (
            |m| m.merges[5] = "ab".into(),
            "merges[5] is \"ab\", but two tokens with a space between are accepted",
        ),
        (
            |m| m.merges[5] = "a b c".into(),
            "merges[5] is \"a b c\", but its two parts, and both together, must be tokens",
        ),
        (
            |m| m.merges[5] = "a ".into(),
            "merges[5] is \"a \", but its two parts, and both together, must be tokens",
        ),
        (
            |m| m.merges[5] = format!("{0} {0}", m.tokens[0]),
            "merges[5] is \"<｜start▁of▁sentence｜> <｜start▁of▁sentence｜>\", but its two parts, \
             and both together, must be tokens",
        ),
        (
            |m| m.merges[5] = "x".repeat(1 << 20),
            "merges[5] is \"xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\"…, but \
             two tokens with a space between are accepted",
        ),
        (
            |m| m.merges[5] = m.merges[2].clone(),
            "merges[5] is \"Ġ a\", but an earlier merge is the same",
        ),
        (|m| m.bos = Some(2048), "bos_token_id is 2048, but it must be the id of a token"),
        (
            |m| m.token_types[1] = GgufTokenizer::UNUSED,
            "eos_token_id is 1, but it must be the id of a token",
        ),
        (
            |m| {
                m.add_bos = true;
                m.bos = None;
            },
            "add_bos_token is true, but tokenizer.ggml.bos_token_id is missing",
        ),
    ];
    for (change, expected) in cases {
        let error = Tokenizer::from_gguf(&changed(change), Path::new("m.gguf")).unwrap_err();
        assert_eq!(error.to_string(), format!("m.gguf: tokenizer.ggml.{expected}"));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_text_encodes_as_with_the_folder(text in "(\\PC|[\\s0-9a-z<|>一-龥]){0,60}") {
        let [plain, _] = both_modes(&text);
        prop_assert_eq!(GGUF.decode(&plain), text);
    }

    #[test]
    fn any_metadata_is_used_or_refused(
        moves in prop::collection::vec((0..2048usize, 0..2048usize), 0..3),
        kinds in prop::collection::vec((0..2048usize, 0..7i32), 0..3),
        merges in prop::collection::vec((0..1765usize, "[a-eĠ ]{0,4}"), 0..2),
        ids in any::<(Option<u32>, Option<u32>, bool)>(),
    ) {
        let metadata = changed(|m| {
            moves.iter().for_each(|&(from, to)| m.tokens.swap(from, to));
            kinds.iter().for_each(|&(id, kind)| m.token_types[id] = kind);
            merges.into_iter().for_each(|(rank, text)| m.merges[rank] = text);
            (m.bos, m.eos, m.add_bos) = (ids.0.map(|id| id % 2100), ids.1.map(|id| id % 2100), ids.2);
        });
        if let Ok(tokenizer) = Tokenizer::from_gguf(&metadata, Path::new("m.gguf")) {
            let text = "The <|Bot|> said: Hello, wörld 今日 123!";
            let ids = tokenizer.encode(text, AddedTokens::AsText).unwrap();
            prop_assert!(ids.iter().all(|&id| tokenizer.has_token(id)));
            tokenizer.encode(text, AddedTokens::Parse).unwrap();
        }
    }
}
