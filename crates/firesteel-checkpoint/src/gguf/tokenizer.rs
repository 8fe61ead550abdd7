//! The tokenizer in the metadata of a GGUF file.

use super::config::{BOS, EOS, PADDING, Reader};
use super::{Gguf, GgufValue};
use crate::json::{parse_object, read_bounded, shorten};
use crate::{Checkpoint, CheckpointError, PreTokenizer};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::Path;

pub(crate) const MODEL: &str = "tokenizer.ggml.model";
pub(crate) const PRE: &str = "tokenizer.ggml.pre";
pub(crate) const TOKENS: &str = "tokenizer.ggml.tokens";
pub(crate) const TOKEN_TYPES: &str = "tokenizer.ggml.token_type";
pub(crate) const MERGES: &str = "tokenizer.ggml.merges";
pub(crate) const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
pub(crate) const CHAT_TEMPLATE: &str = "tokenizer.chat_template";
/// Values of [`MODEL`] of a file without a tokenizer.
pub(crate) const NO_TOKENIZER: [&str; 2] = ["none", "no_vocab"];
/// Most merges for each token. A byte-level vocabulary needs one; some converters write every way
/// to make a token.
const MERGES_PER_TOKEN: usize = 16;
/// Longest file of a folder's tokenizer, in bytes.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// A byte-level BPE tokenizer as GGUF files hold it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct GgufTokenizer {
    /// Kind of tokenizer; `gpt2` is byte-level BPE.
    pub model: String,
    /// Name of the pre-tokenizer, see [`PreTokenizer`](crate::PreTokenizer).
    pub pre: Option<String>,
    /// Text of each token by id; bytes are spelled as characters, as in tokenizer.json.
    pub tokens: Vec<String>,
    /// Kind of each token by id; see [`GgufTokenizer::NORMAL`] and its neighbours.
    pub token_types: Vec<i32>,
    /// Merges by rank: two tokens with a space between.
    pub merges: Vec<String>,
    /// Id that begins a sequence.
    pub bos: Option<u32>,
    /// Id that ends a sequence.
    pub eos: Option<u32>,
    /// Id that pads a sequence.
    pub pad: Option<u32>,
    /// Whether a sequence begins with `bos`; false where the file does not say.
    pub add_bos: bool,
    /// The Jinja template of conversations.
    pub chat_template: Option<String>,
}

impl GgufTokenizer {
    /// Type of a token of the vocabulary.
    pub const NORMAL: i32 = 1;
    /// Type of a special token: it is not part of the text.
    pub const CONTROL: i32 = 3;
    /// Type of an added token that is part of the text.
    pub const USER_DEFINED: i32 = 4;
    /// Type of an id without a token.
    pub const UNUSED: i32 = 5;

    /// The tokenizer of a file; `None` when it has none.
    ///
    /// # Errors
    /// When a key is missing or has a value that cannot be used.
    pub fn of(gguf: &Gguf) -> Result<Option<Self>, CheckpointError> {
        let reader = Reader { gguf };
        let model = match reader.get(MODEL) {
            None => return Ok(None),
            Some(GgufValue::String(model)) if NO_TOKENIZER.contains(&model) => return Ok(None),
            Some(GgufValue::String("gpt2")) => "gpt2".to_owned(),
            Some(_) => {
                let accepted = "\"gpt2\", that is byte-level BPE, or \"none\"";
                return Err(reader.error(MODEL, accepted.into()));
            }
        };
        let tokens = strings(&reader, TOKENS, usize::MAX)?;
        let merges = strings(&reader, MERGES, tokens.len().saturating_mul(MERGES_PER_TOKEN))?;
        let wrong_types =
            || reader.error(TOKEN_TYPES, format!("an array of {} integers", tokens.len()));
        let token_types = match reader.get(TOKEN_TYPES) {
            None => vec![Self::NORMAL; tokens.len()],
            Some(value) => value
                .as_array()
                .filter(|types| types.len() == tokens.len())
                .and_then(|types| {
                    types.iter().map(|kind| i32::try_from(kind.as_u64()?).ok()).collect()
                })
                .ok_or_else(wrong_types)?,
        };
        let add_bos = match reader.get(ADD_BOS) {
            None => false,
            Some(value) => {
                value.as_bool().ok_or_else(|| reader.error(ADD_BOS, "true or false".into()))?
            }
        };
        Ok(Some(Self {
            model,
            pre: string(&reader, PRE)?,
            bos: reader.token_id(BOS, tokens.len())?,
            eos: reader.token_id(EOS, tokens.len())?,
            pad: reader.token_id(PADDING, tokens.len())?,
            tokens,
            token_types,
            merges,
            add_bos,
            chat_template: string(&reader, CHAT_TEMPLATE)?,
        }))
    }
}

impl GgufTokenizer {
    /// The tokenizer of a checkpoint: that of the GGUF file, or tokenizer.json of the folder with
    /// chat_template.jinja (or the template in tokenizer_config.json) and the ids of the config;
    /// `None` when there is neither.
    ///
    /// # Errors
    /// When there is one that cannot be used, or one that makes other tokens of a text than the
    /// metadata would say.
    pub fn of_checkpoint(checkpoint: &Checkpoint) -> Result<Option<Self>, CheckpointError> {
        Ok(Described::of_checkpoint(checkpoint)?.map(|described| described.tokenizer))
    }
}

/// A tokenizer as the metadata describes it, and what they have no place for.
pub(super) struct Described {
    pub(super) tokenizer: GgufTokenizer,
    pub(super) warnings: Vec<String>,
}

impl Described {
    /// See [`GgufTokenizer::of_checkpoint`].
    pub(super) fn of_checkpoint(checkpoint: &Checkpoint) -> Result<Option<Self>, CheckpointError> {
        if checkpoint.gguf().is_some() {
            let tokenizer = checkpoint.gguf_tokenizer()?;
            return Ok(tokenizer.map(|tokenizer| Self { tokenizer, warnings: Vec::new() }));
        }
        let Some(path) = checkpoint.side_file("tokenizer.json")? else { return Ok(None) };
        let text = read_bounded(&path, MAX_FILE_BYTES)?;
        let json: TokenizerJson = serde_json::from_slice(&text).map_err(|e| {
            let reason = format!("not the tokenizer.json of a byte-level BPE tokenizer: {e}");
            CheckpointError::Json { file: path.clone(), reason }
        })?;
        let config = checkpoint.config();
        let (tokens, token_types) = json
            .tokens(config.vocab_size)
            .map_err(|reason| CheckpointError::Json { file: path.clone(), reason })?;
        let pre = json.pre_tokenizer(&path)?;
        let add_bos = json.described(&path, config.bos_token_id)?;
        let mut warnings = json.unplaced();
        let merges = json.model.merges.into_iter().map(Merge::into_text).collect();
        let tokenizer = GgufTokenizer {
            model: "gpt2".into(),
            pre: Some(pre.name.into()),
            tokens,
            token_types,
            merges,
            bos: config.bos_token_id,
            eos: config.eos_token_ids.first().copied(),
            pad: config.pad_token_id,
            add_bos,
            chat_template: chat_template(checkpoint, &mut warnings)?,
        };
        Ok(Some(Self { tokenizer, warnings }))
    }
}

/// The parts of tokenizer.json that a GGUF file holds.
#[derive(Deserialize)]
struct TokenizerJson {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    model: BpeModel,
}

#[derive(Deserialize)]
struct AddedToken {
    id: usize,
    content: String,
    special: bool,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
}

#[derive(Deserialize)]
struct BpeModel {
    #[serde(rename = "type")]
    kind: String,
    vocab: HashMap<String, usize>,
    merges: Vec<Merge>,
    #[serde(default)]
    dropout: Value,
    #[serde(default)]
    continuing_subword_prefix: Value,
    #[serde(default)]
    end_of_word_suffix: Value,
    #[serde(default)]
    ignore_merges: Value,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Text(String),
    Pair([String; 2]),
}

impl Merge {
    fn into_text(self) -> String {
        match self {
            Merge::Text(text) => text,
            Merge::Pair(pair) => pair.join(" "),
        }
    }
}

impl TokenizerJson {
    /// Text and type of each id below `size`; ids without a token are filled up.
    fn tokens(&self, size: usize) -> Result<(Vec<String>, Vec<i32>), String> {
        if self.model.kind != "BPE" {
            return Err(format!("model.type is {:?}; accepted: \"BPE\"", self.model.kind));
        }
        let mut tokens = vec![None; size];
        let normal = self.model.vocab.iter().map(|(text, id)| (*id, text, GgufTokenizer::NORMAL));
        let added = self.added_tokens.iter().map(|token| match token.special {
            true => (token.id, &token.content, GgufTokenizer::CONTROL),
            false => (token.id, &token.content, GgufTokenizer::USER_DEFINED),
        });
        // An added token is in the vocabulary too and decides what kind it is.
        for (id, text, kind) in normal.chain(added) {
            let token = tokens.get_mut(id).ok_or_else(|| {
                format!("token {text:?} has id {id}; accepted: below vocab_size {size}")
            })?;
            *token = Some((text.clone(), kind));
        }
        let filled = tokens.into_iter().enumerate().map(|(id, token)| {
            token.unwrap_or_else(|| (format!("[PAD{id}]"), GgufTokenizer::UNUSED))
        });
        Ok(filled.unzip())
    }

    /// The pre-tokenizer by the name that a GGUF file says.
    fn pre_tokenizer(&self, path: &Path) -> Result<&'static PreTokenizer, CheckpointError> {
        let known = PreTokenizer::of_json(&self.pre_tokenizer).ok_or_else(|| {
            let accepted = "the splits, digits and bytes of a pre-tokenizer with a name";
            refusal(path, "pre_tokenizer", &self.pre_tokenizer, accepted)
        })?;
        if !known.goes_with(&self.normalizer) {
            let accepted = if known.nfc { "NFC" } else { "none" };
            return Err(refusal(path, "normalizer", &self.normalizer, accepted));
        }
        Ok(known)
    }

    /// Refuses a tokenizer that makes other tokens of a text than a GGUF file with its
    /// pre-tokenizer does. Returns whether a sequence begins with `bos`.
    fn described(&self, path: &Path, bos: Option<u32>) -> Result<bool, CheckpointError> {
        let refuse = |key: &str, value: &Value, accepted: &str| refusal(path, key, value, accepted);
        let empty = |value: &Value| {
            value.as_array().is_some_and(Vec::is_empty) || value.as_str().is_some_and(str::is_empty)
        };
        let BpeModel { dropout, continuing_subword_prefix, end_of_word_suffix, .. } = &self.model;
        for (key, value) in [
            ("model.dropout", dropout),
            ("model.continuing_subword_prefix", continuing_subword_prefix),
            ("model.end_of_word_suffix", end_of_word_suffix),
            ("model.ignore_merges", &self.model.ignore_merges),
        ] {
            let neutral = value.is_null() || *value == json!(false) || empty(value);
            if !neutral && value.as_f64() != Some(0.0) {
                return Err(refuse(key, value, "none"));
            }
        }
        adds_bos(&self.post_processor, bos).ok_or_else(|| {
            let accepted = "none, ByteLevel, or a template with no more than the bos token before";
            refuse("post_processor", &self.post_processor, accepted)
        })
    }

    /// How added tokens are found, as far as the metadata has no place for it.
    fn unplaced(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        for token in &self.added_tokens {
            let settings = [
                ("single_word", token.single_word),
                ("lstrip", token.lstrip),
                ("rstrip", token.rstrip),
            ];
            for (key, _) in settings.into_iter().filter(|(_, given)| *given) {
                warnings.push(format!(
                    "tokenizer.json: {key} = true of the added token {:?} has no place in a GGUF file",
                    shorten(&token.content)
                ));
            }
        }
        warnings
    }
}

fn refusal(path: &Path, key: &str, value: &Value, accepted: &str) -> CheckpointError {
    CheckpointError::Config {
        file: path.into(),
        key: key.into(),
        value: if value.is_null() { "missing".into() } else { shorten(&value.to_string()).into() },
        accepted: format!(
            "{accepted}, which is what a GGUF file of this architecture stands for; move \
             tokenizer.json away to write one without a tokenizer"
        ),
    }
}

/// Whether a post-processor puts `bos` before a text; `None` where it puts anything else around it.
fn adds_bos(post_processor: &Value, bos: Option<u32>) -> Option<bool> {
    if post_processor.is_null() {
        return Some(false);
    }
    match post_processor.get("type")?.as_str()? {
        "ByteLevel" => Some(false),
        "Sequence" => {
            let mut adds = false;
            for part in post_processor.get("processors")?.as_array()? {
                let part = adds_bos(part, bos)?;
                if adds && part {
                    return None;
                }
                adds |= part;
            }
            Some(adds)
        }
        "TemplateProcessing" => match post_processor.get("single")?.as_array()?.as_slice() {
            [text] => text.get("Sequence").map(|_| false),
            [token, text] => {
                text.get("Sequence")?;
                let name = token.get("SpecialToken")?.get("id")?.as_str()?;
                let token = post_processor.get("special_tokens")?.get(name)?;
                let [id] = token.get("ids")?.as_array()?.as_slice() else { return None };
                (id.as_u64() == Some(bos?.into())).then_some(true)
            }
            _ => None,
        },
        _ => None,
    }
}

/// The template that is used without a name; `warnings` get the names of others.
fn chat_template(
    checkpoint: &Checkpoint,
    warnings: &mut Vec<String>,
) -> Result<Option<String>, CheckpointError> {
    let read = |path: &Path| read_bounded(path, super::MAX_STRING_BYTES as u64);
    if let Some(path) = checkpoint.side_file("chat_template.jinja")? {
        let text = String::from_utf8(read(&path)?)
            .map_err(|e| CheckpointError::Path { path, reason: e.to_string() })?;
        return Ok(Some(text));
    }
    let Some(path) = checkpoint.side_file("tokenizer_config.json")? else { return Ok(None) };
    let text = read_bounded(&path, MAX_FILE_BYTES)?;
    let value = match parse_object(&path, &text)?.remove("chat_template") {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(template)) => return Ok(Some(template)),
        Some(value) => value,
    };
    let (named, others): (Vec<&Value>, Vec<&Value>) = (value.as_array().into_iter().flatten())
        .partition(|entry| entry.get("name").and_then(Value::as_str) == Some("default"));
    if let Some(template) = named.first().and_then(|entry| entry.get("template")?.as_str()) {
        warnings.extend(others.into_iter().map(|entry| {
            let name = entry.get("name").map_or_else(|| "null".into(), Value::to_string);
            format!(
                "tokenizer_config.json: the chat template {} is not in the file",
                shorten(&name)
            )
        }));
        return Ok(Some(template.to_owned()));
    }
    Err(CheckpointError::Config {
        file: path,
        key: "chat_template".into(),
        value: shorten(&value.to_string()).into(),
        accepted: "a text, or a list with a template named default".into(),
    })
}

fn string(reader: &Reader<'_>, key: &str) -> Result<Option<String>, CheckpointError> {
    match reader.get(key) {
        None => Ok(None),
        Some(GgufValue::String(text)) => Ok(Some(text.to_owned())),
        Some(_) => Err(reader.error(key, "a string".into())),
    }
}

fn strings(reader: &Reader<'_>, key: &str, limit: usize) -> Result<Vec<String>, CheckpointError> {
    let array = reader.get(key).and_then(|value| value.as_array());
    let list = array.filter(|array| array.len() <= limit).and_then(|array| {
        array.iter().map(|value| value.as_str().map(str::to_owned)).collect::<Option<Vec<_>>>()
    });
    list.ok_or_else(|| {
        let most = if limit == usize::MAX { String::new() } else { format!("at most {limit} ") };
        reader.error(key, format!("an array of {most}strings"))
    })
}
