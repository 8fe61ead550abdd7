use crate::files::{JsonFile, special_tokens};
use crate::gguf::GgufSource;
use crate::words::Words;
use crate::{GenerateError, GenerationConfig, Utf8Stream};
use firesteel_checkpoint::{GgufTokenizer, file_in, mistaken_file};
use std::collections::HashMap;
use std::fmt;
use std::path::Path;
use tokenizers::{
    DecoderWrapper, Model, NormalizedString, Normalizer, OffsetReferential, OffsetType,
    PreTokenizedString, Token,
};

/// Whether the spelling of an added token, such as `<|Bot|>`, in a text is that token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddedTokens {
    /// It is plain text: for prompts that come from a user. The ids contain no added token except
    /// what the tokenizer's own post-processor puts around the text.
    AsText,
    /// It is the token: for prompts written with the model's format in mind.
    Parse,
}

/// A byte-level BPE tokenizer with the token names and generation settings of its folder or file.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    words: Words,
    tokens: HashMap<u32, TokenBytes>,
    added: Vec<String>,
    eos_token_id: Option<u32>,
    generation: GenerationConfig,
}

struct TokenBytes {
    bytes: Box<[u8]>,
    added: bool,
    hidden: bool,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer").field("tokens", &self.tokens.len()).finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Opens tokenizer.json of `folder`, and tokenizer_config.json and generation_config.json if
    /// they exist.
    ///
    /// # Errors
    /// When tokenizer.json is missing or no byte-level BPE tokenizer, or another file has a value
    /// of the wrong type.
    pub fn open(folder: &Path) -> Result<Self, GenerateError> {
        let path = folder.join("tokenizer.json");
        let file = file_in(folder, "tokenizer.json")?;
        let bytes = fs_err::read(file.as_deref().unwrap_or(&path))?;
        let failed = |message| GenerateError::Tokenizer { path: path.clone(), message };
        if let Some(mistake) = mistaken_file(&bytes) {
            return Err(failed(mistake.into()));
        }
        // The library panics on some files that contradict themselves.
        let parsed = std::panic::catch_unwind(|| tokenizers::Tokenizer::from_bytes(&bytes));
        let mut inner = parsed
            .map_err(|_| failed("it contradicts itself: merges and vocabulary do not fit".into()))?
            .map_err(|e| failed(e.to_string()))?;
        // Both change what a text encodes to; a prompt must not be cut or filled in silence.
        inner.with_truncation(None).map_err(|e| failed(e.to_string()))?;
        inner.with_padding(None);
        if !matches!(inner.get_decoder(), Some(DecoderWrapper::ByteLevel(_))) {
            let message = "the decoder is not ByteLevel: only byte-level BPE is supported";
            return Err(failed(message.into()));
        }
        let config = JsonFile::open_if_present(folder, "tokenizer_config.json")?;
        let eos_token_id = special_tokens(&config)
            .find(|(key, _)| *key == "eos_token")
            .and_then(|(_, text)| inner.token_to_id(text));
        let generation = GenerationConfig::open(folder)?;
        Self::new(inner, eos_token_id, generation).map_err(failed)
    }

    /// The tokenizer in the metadata of the GGUF file `origin`. Its generation settings are the
    /// defaults, that is greedy, with the end-of-sequence id of the file.
    ///
    /// # Errors
    /// When its pre-tokenizer is not known, tokens or merges contradict each other, or an id has
    /// no token; the error names the key.
    pub fn from_gguf(tokenizer: &GgufTokenizer, origin: &Path) -> Result<Self, GenerateError> {
        let source = GgufSource { tokenizer, origin };
        let inner = source.build()?;
        source.bos()?;
        let eos_token_id = source.eos()?.map(|(id, _)| id);
        let generation = GenerationConfig {
            eos_token_ids: eos_token_id.into_iter().collect(),
            ..GenerationConfig::default()
        };
        Self::new(inner, eos_token_id, generation)
            .map_err(|message| GenerateError::Tokenizer { path: origin.into(), message })
    }

    /// The same tokenizer with other advice on generation; its end ids are added to those that are
    /// known.
    #[must_use]
    pub fn with_generation_config(mut self, mut config: GenerationConfig) -> Self {
        config.eos_token_ids.extend(std::mem::take(&mut self.generation.eos_token_ids));
        self.generation = config;
        self
    }

    fn new(
        inner: tokenizers::Tokenizer,
        eos_token_id: Option<u32>,
        generation: GenerationConfig,
    ) -> Result<Self, String> {
        let words = Words::new(inner.get_pre_tokenizer())?;
        let alphabet = byte_alphabet();
        let mut tokens: HashMap<u32, TokenBytes> = HashMap::new();
        for (text, id) in inner.get_vocab(false) {
            let bytes: Option<Box<[u8]>> =
                text.chars().map(|c| alphabet.get(&c).copied()).collect();
            let bytes = bytes.unwrap_or_else(|| text.as_bytes().into());
            tokens.insert(id, TokenBytes { bytes, added: false, hidden: false });
        }
        let mut added = Vec::new();
        for (id, token) in inner.get_added_tokens_decoder() {
            let bytes = token.content.as_bytes().into();
            tokens.insert(id, TokenBytes { bytes, added: true, hidden: token.special });
            added.push(token.content);
        }
        Ok(Self { inner, words, tokens, added, eos_token_id, generation })
    }

    /// The ids of a plain prompt, with what the tokenizer's post-processor adds (nothing in
    /// Spark's).
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn encode(&self, text: &str, added: AddedTokens) -> Result<Vec<u32>, GenerateError> {
        let pieces = match added {
            AddedTokens::Parse => self.parsed(text),
            AddedTokens::AsText => self.plain(text),
        };
        let encoding = pieces
            .and_then(|pieces| pieces.into_encoding(None, 0, OffsetType::None))
            .and_then(|encoding| self.inner.post_process(encoding, None, true));
        Ok(encoding.map_err(encode_error)?.get_ids().to_vec())
    }

    /// The sequences of ids to forbid so that the plain text `word` is not generated: those that it
    /// encodes to at the beginning of a text and after a space. A tokenizer has other ways to
    /// spell a word, which a model hardly uses.
    ///
    /// # Errors
    /// When the word is empty, or the tokenizer fails.
    pub fn bad_word(&self, word: &str) -> Result<Vec<Vec<u32>>, GenerateError> {
        if word.is_empty() {
            let accepted = "at least one character is needed";
            return Err(GenerateError::option("a bad word", "empty", accepted));
        }
        let plain = self.plain_ids(word)?;
        let spaced = self.plain_ids(&format!(" {word}"))?;
        // What ends in the plain spelling is forbidden with it.
        let is_new = !spaced.ends_with(&plain);
        Ok(std::iter::once(plain).chain(is_new.then_some(spaced)).collect())
    }

    /// The ids of a rendered chat prompt. Added tokens with the character `guard` in them are
    /// plain text, and the character itself is left out.
    pub(crate) fn encode_guarded(
        &self,
        text: &str,
        guard: char,
    ) -> Result<Vec<u32>, GenerateError> {
        let added = self.inner.get_added_vocabulary();
        let pieces = added.extract_and_normalize(self.inner.get_normalizer(), text);
        let mut ids = Vec::new();
        for (_, (start, end), tokens) in
            pieces.get_splits(OffsetReferential::Original, OffsetType::Byte)
        {
            match tokens {
                Some(tokens) => ids.extend(tokens.iter().map(|token| token.id)),
                None => {
                    let run = text.get(start..end).unwrap_or_default().replace(guard, "");
                    ids.extend(self.plain_ids(&run)?);
                }
            }
        }
        Ok(ids)
    }

    /// The ids of `text` alone: no added tokens in it, and none around it.
    fn plain_ids(&self, text: &str) -> Result<Vec<u32>, GenerateError> {
        let pieces = self.plain(text).map_err(encode_error)?;
        let splits = pieces.get_splits(OffsetReferential::Original, OffsetType::None);
        let tokens = splits.iter().filter_map(|(_, _, tokens)| tokens.as_ref());
        Ok(tokens.flatten().map(|token| token.id).collect())
    }

    /// Tokenizes with the added tokens that are spelled in the text.
    fn parsed(&self, text: &str) -> tokenizers::Result<PreTokenizedString> {
        let added = self.inner.get_added_vocabulary();
        let mut pieces = added.extract_and_normalize(self.inner.get_normalizer(), text);
        self.words.cut(&mut pieces)?;
        pieces.tokenize(|piece| self.inner.get_model().tokenize(piece.get()))?;
        Ok(pieces)
    }

    /// Tokenizes without looking for added tokens.
    fn plain(&self, text: &str) -> tokenizers::Result<PreTokenizedString> {
        let mut normalized = NormalizedString::from(text);
        if let Some(normalizer) = self.inner.get_normalizer() {
            normalizer.normalize(&mut normalized)?;
        }
        let mut pieces = PreTokenizedString::from(normalized);
        self.words.cut(&mut pieces)?;
        pieces.tokenize(|piece| self.plain_piece(piece.get()))?;
        Ok(pieces)
    }

    /// Tokenizes one word. Where the model itself knows an added token as a word, as it can with
    /// `ignore_merges`, the word is tokenized character by character.
    fn plain_piece(&self, piece: &str) -> tokenizers::Result<Vec<Token>> {
        let model = self.inner.get_model();
        let tokens = model.tokenize(piece)?;
        if !tokens.iter().any(|token| self.is_added(token.id)) {
            return Ok(tokens);
        }
        let characters = piece.char_indices();
        let tokens = characters.map(|(at, c)| model.tokenize(&piece[at..at + c.len_utf8()]));
        Ok(tokens.collect::<tokenizers::Result<Vec<_>>>()?.concat())
    }

    /// The text of `ids`: their bytes together, with U+FFFD for what is not UTF-8. Tokens marked
    /// as special, and ids without a token, have no text.
    pub fn decode(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| self.text_bytes(id)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The bytes of a token, special or not; `None` for an id without a token.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        Some(&*self.tokens.get(&id)?.bytes)
    }

    /// The bytes that a token adds to shown text: none for a special token or no token.
    fn text_bytes(&self, id: u32) -> &[u8] {
        self.tokens.get(&id).filter(|token| !token.hidden).map_or(&[], |token| &*token.bytes)
    }

    /// Whether `id` has a token.
    pub fn has_token(&self, id: u32) -> bool {
        self.tokens.contains_key(&id)
    }

    /// Whether `id` is an added token, special or not.
    pub fn is_added(&self, id: u32) -> bool {
        self.tokens.get(&id).is_some_and(|token| token.added)
    }

    /// The id of the token spelled `text` in the vocabulary.
    pub fn token_id(&self, text: &str) -> Option<u32> {
        self.inner.token_to_id(text)
    }

    /// Spelling of every added token, in no particular order.
    pub(crate) fn added_tokens(&self) -> &[String] {
        &self.added
    }

    /// For each id below `vocab_size` whether it has a token: the ids that may be sampled. The
    /// rows of a padded vocabulary have none.
    pub fn allowed_ids(&self, vocab_size: usize) -> Vec<bool> {
        let ids = 0..u32::try_from(vocab_size).unwrap_or(u32::MAX);
        ids.map(|id| self.has_token(id)).collect()
    }

    /// Id of the `eos_token` of tokenizer_config.json, or that of the GGUF file.
    pub fn eos_token_id(&self) -> Option<u32> {
        self.eos_token_id
    }

    /// The settings of generation_config.json, or their defaults.
    pub fn generation_config(&self) -> &GenerationConfig {
        &self.generation
    }
}

fn encode_error(error: tokenizers::Error) -> GenerateError {
    GenerateError::Encode { message: error.to_string() }
}

/// The characters that stand for the 256 bytes in a byte-level vocabulary: printable Latin-1
/// characters for themselves, U+0100 and following for the other bytes in order.
pub(crate) fn byte_alphabet() -> HashMap<char, u8> {
    let mut others = '\u{100}'..;
    (0..=u8::MAX)
        .filter_map(|byte| {
            let printable = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
            let character = if printable { Some(char::from(byte)) } else { others.next() };
            Some((character?, byte))
        })
        .collect()
}

/// Turns ids into text as they come, never emitting a part of a character.
///
/// The text is made from the tokens' bytes, so a character that is split over tokens comes out
/// whole with its last one. The pieces together equal [`Tokenizer::decode`] of all ids.
#[derive(Debug, Clone)]
pub struct TextStream<'t> {
    tokenizer: &'t Tokenizer,
    utf8: Utf8Stream,
}

impl<'t> TextStream<'t> {
    /// An empty stream.
    pub fn new(tokenizer: &'t Tokenizer) -> Self {
        Self { tokenizer, utf8: Utf8Stream::default() }
    }

    /// Takes `id` and returns the text that is complete now, often nothing.
    pub fn push(&mut self, id: u32) -> String {
        self.utf8.push(self.tokenizer.text_bytes(id))
    }

    /// Ends the stream: U+FFFD if the last character is incomplete, else nothing.
    pub fn finish(&mut self) -> &'static str {
        self.utf8.finish()
    }
}
