//! The tokenizer of a GGUF file as one of the `tokenizers` library.

use crate::GenerateError;
use crate::tokenizer::byte_alphabet;
use firesteel_checkpoint::{GgufTokenizer, PreTokenizer};
use std::collections::HashSet;
use std::collections::hash_map::Entry;
use std::path::Path;
use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::models::bpe::{BpeBuilder, Merges, Vocab};
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::processors::template::{SpecialToken, TemplateProcessing};
use tokenizers::{AddedToken, SplitDelimiterBehavior, Tokenizer};

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
const BOS: &str = "tokenizer.ggml.bos_token_id";
const EOS: &str = "tokenizer.ggml.eos_token_id";
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
/// Key of the chat template.
pub(crate) const CHAT_TEMPLATE: &str = "tokenizer.chat_template";

/// Characters of a value that an error shows.
const SHOWN: usize = 60;

/// Most bytes of all added tokens together. Models have some kilobytes of them; the automaton that
/// looks for them takes a long time to build for many megabytes.
const MAX_ADDED_BYTES: usize = 1 << 20;

/// A view of a file's tokenizer that names the file in errors.
pub(crate) struct GgufSource<'a> {
    pub(crate) tokenizer: &'a GgufTokenizer,
    pub(crate) origin: &'a Path,
}

impl<'a> GgufSource<'a> {
    /// The tokenizer: ids with the type [`GgufTokenizer::UNUSED`] have no token in it.
    pub(crate) fn build(&self) -> Result<Tokenizer, GenerateError> {
        if self.tokenizer.model != "gpt2" {
            let accepted = "only \"gpt2\", that is byte-level BPE, is supported";
            return Err(self.error(MODEL, shown(&self.tokenizer.model), accepted));
        }
        let pre_tokenizer = self.pre_tokenizer()?;
        let (vocab, added) = self.vocabulary()?;
        let merges = self.merges(&vocab)?;
        let failed = |error: tokenizers::Error| self.failed(error.to_string());
        let model = BpeBuilder::new().vocab_and_merges(vocab, merges).build().map_err(failed)?;
        let mut built = Tokenizer::new(model);
        built.with_normalizer(pre_tokenizer.nfc.then_some(NFC)).map_err(failed)?;
        built
            .with_pre_tokenizer(Some(self.steps(pre_tokenizer)?))
            .with_decoder(Some(ByteLevel::default()));
        if self.tokenizer.add_bos {
            built.with_post_processor(Some(self.begin()?));
        }
        built.add_tokens(added).map_err(failed)?;
        Ok(built)
    }

    /// Id and spelling of the token that begins a sequence.
    pub(crate) fn bos(&self) -> Result<Option<(u32, &'a str)>, GenerateError> {
        self.token(BOS, self.tokenizer.bos)
    }

    /// Id and spelling of the token that ends a sequence.
    pub(crate) fn eos(&self) -> Result<Option<(u32, &'a str)>, GenerateError> {
        self.token(EOS, self.tokenizer.eos)
    }

    fn token(&self, key: &str, id: Option<u32>) -> Result<Option<(u32, &'a str)>, GenerateError> {
        let Some(id) = id else { return Ok(None) };
        let Self { tokenizer, .. } = self;
        let index = id as usize;
        let used = tokenizer.token_types.get(index).is_some_and(|k| *k != GgufTokenizer::UNUSED);
        match tokenizer.tokens.get(index).filter(|_| used) {
            Some(text) => Ok(Some((id, text))),
            None => Err(self.error(key, id.to_string(), "it must be the id of a token")),
        }
    }

    fn pre_tokenizer(&self) -> Result<&'static PreTokenizer, GenerateError> {
        let name = self.tokenizer.pre.as_deref();
        name.and_then(PreTokenizer::of).ok_or_else(|| {
            let value = name.map_or_else(|| "missing".into(), shown);
            self.error(PRE, value, PreTokenizer::KNOWN)
        })
    }

    fn steps(&self, pre_tokenizer: &PreTokenizer) -> Result<Sequence, GenerateError> {
        let mut steps = Vec::new();
        for regex in pre_tokenizer.splits {
            let pattern = SplitPattern::Regex((*regex).into());
            let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
                .map_err(|error| self.failed(error.to_string()))?;
            steps.push(split.into());
        }
        if pre_tokenizer.single_digits {
            steps.push(Digits::new(true).into());
        }
        steps.push(ByteLevel::new(false, true, false).into());
        Ok(Sequence::new(steps))
    }

    /// The vocabulary with the added tokens in it, and the added tokens.
    fn vocabulary(&self) -> Result<(Vocab, Vec<AddedToken>), GenerateError> {
        let GgufTokenizer { tokens, token_types, .. } = self.tokenizer;
        if token_types.len() != tokens.len() {
            let value = format!("an array of {}", token_types.len());
            return Err(self.error(TOKEN_TYPES, value, "one type for each token is needed"));
        }
        let mut vocab = Vocab::new();
        let mut added = Vec::new();
        let mut added_bytes = 0usize;
        for ((id, text), &kind) in (0u32..).zip(tokens).zip(token_types) {
            match kind {
                GgufTokenizer::UNUSED => continue,
                GgufTokenizer::NORMAL => {}
                GgufTokenizer::CONTROL | GgufTokenizer::USER_DEFINED => {
                    added_bytes = added_bytes.saturating_add(text.len());
                    if added_bytes > MAX_ADDED_BYTES {
                        let accepted = "the added tokens may have 1 MiB of text together";
                        return Err(self.item_error(TOKENS, id, shown(text), accepted));
                    }
                    let special = kind == GgufTokenizer::CONTROL;
                    added.push(AddedToken::from(text, special).normalized(false));
                }
                other => {
                    let accepted = "1 (normal), 3 (control), 4 (user-defined) or 5 (unused) is \
                                    accepted";
                    return Err(self.item_error(TOKEN_TYPES, id, other.to_string(), accepted));
                }
            }
            if text.is_empty() {
                let accepted = "a token has at least one character";
                return Err(self.item_error(TOKENS, id, shown(text), accepted));
            }
            match vocab.entry(text.clone()) {
                Entry::Vacant(entry) => entry.insert(id),
                Entry::Occupied(entry) => {
                    let value = format!("{}, as token {} is", shown(text), entry.get());
                    let accepted = "no two ids may have the same token";
                    return Err(self.item_error(TOKENS, id, value, accepted));
                }
            };
        }
        self.check_bytes(&vocab)?;
        Ok((vocab, added))
    }

    /// Text with a byte that has no token would lose it in silence, and one whose byte is an added
    /// token would have that token in it.
    fn check_bytes(&self, vocab: &Vocab) -> Result<(), GenerateError> {
        let is_in_utf8 = |byte: u8| !matches!(byte, 0xc0 | 0xc1 | 0xf5..);
        let has_token = |character: char| {
            let id = vocab.get(character.encode_utf8(&mut [0; 4]) as &str);
            let kind = id.and_then(|&id| self.tokenizer.token_types.get(id as usize));
            kind == Some(&GgufTokenizer::NORMAL)
        };
        let alphabet = byte_alphabet();
        let without = alphabet.iter().filter(|(c, byte)| is_in_utf8(**byte) && !has_token(**c));
        match without.min_by_key(|(_, byte)| **byte) {
            None => Ok(()),
            Some((character, byte)) => {
                let value = format!("without {character:?} for the byte {byte:#04x}");
                Err(self.error(TOKENS, value, "each byte of UTF-8 needs a token of type 1"))
            }
        }
    }

    fn merges(&self, vocab: &Vocab) -> Result<Merges, GenerateError> {
        let mut seen = HashSet::new();
        let mut merges = Merges::new();
        for (rank, merge) in (0u32..).zip(&self.tokenizer.merges) {
            let failed = |accepted| self.item_error(MERGES, rank, shown(merge), accepted);
            let (left, right) = merge
                .split_once(' ')
                .ok_or_else(|| failed("two tokens with a space between are accepted"))?;
            let known = |text: &str| vocab.contains_key(text);
            if !(known(left) && known(right) && known(&[left, right].concat())) {
                return Err(failed("its two parts, and both together, must be tokens"));
            }
            if !seen.insert(merge) {
                return Err(failed("an earlier merge is the same"));
            }
            merges.push((left.into(), right.into()));
        }
        Ok(merges)
    }

    /// What puts the first token of a sequence before a text.
    fn begin(&self) -> Result<TemplateProcessing, GenerateError> {
        let Some((id, text)) = self.bos()? else {
            let accepted = "tokenizer.ggml.bos_token_id is missing";
            return Err(self.error(ADD_BOS, "true".into(), accepted));
        };
        let token = SpecialToken::new("bos".into(), vec![id], vec![text.into()])
            .map_err(|error| self.failed(error.to_string()))?;
        TemplateProcessing::builder()
            .try_single("bos $A")
            .map_err(|message| self.failed(message))?
            .special_tokens(vec![token])
            .build()
            .map_err(|error| self.failed(error.to_string()))
    }

    fn failed(&self, message: String) -> GenerateError {
        GenerateError::Tokenizer { path: self.origin.into(), message }
    }

    fn error(&self, key: &str, value: String, accepted: &'static str) -> GenerateError {
        GenerateError::Value { path: self.origin.into(), key: key.into(), value, accepted }
    }

    fn item_error(
        &self,
        key: &str,
        index: u32,
        value: String,
        accepted: &'static str,
    ) -> GenerateError {
        self.error(&format!("{key}[{index}]"), value, accepted)
    }
}

/// A text in quotes, shortened when very long.
fn shown(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{:?}…", &text[..end]),
        None => format!("{text:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firesteel_checkpoint::Checkpoint;
    use serde_json::Value;

    const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../");

    #[test]
    fn the_library_gets_what_tokenizer_json_says() {
        let root = Path::new(ROOT);
        let origin = root.join("tests/golden/llamacpp/spark-tiny-f16.gguf");
        let tokenizer = Checkpoint::open(&origin).unwrap().gguf_tokenizer().unwrap().unwrap();
        let source = GgufSource { tokenizer: &tokenizer, origin: &origin };
        let built = serde_json::to_value(source.build().unwrap()).unwrap();
        let text = fs_err::read(root.join("models/spark-tiny/tokenizer.json")).unwrap();
        let expected: Value = serde_json::from_slice(&text).unwrap();
        for part in ["/added_tokens", "/pre_tokenizer", "/model/vocab", "/model/merges"] {
            let (built, expected) = (built.pointer(part).unwrap(), expected.pointer(part).unwrap());
            assert!(built == expected, "{part}");
        }
        assert_eq!(built["decoder"]["type"], expected["decoder"]["type"]);
    }
}
