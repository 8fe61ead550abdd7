//! Texts and conversations that commands read, and their ids.

use anyhow::{Context as _, bail};
use firesteel_artifact::sha256;
use firesteel_generate::{AddedTokens, ChatTemplate, Conversation, Tokenizer};
use firesteel_model::Model;
use firesteel_quantize::TextHash;
use std::io::Read as _;
use std::path::Path;

/// Longest text that is read from a file.
pub(crate) const TEXT_LIMIT: u64 = 16 << 20;

/// A text file of the user's, bounded.
pub(crate) fn read_text(path: &Path) -> anyhow::Result<String> {
    let mut text = String::new();
    let file = fs_err::File::open(path)?;
    let read = file.take(TEXT_LIMIT + 1).read_to_string(&mut text);
    let read = read.with_context(|| format!("{} cannot be read as text", path.display()))?;
    if read as u64 > TEXT_LIMIT {
        bail!("{} is longer than {TEXT_LIMIT} bytes", path.display());
    }
    Ok(text)
}

/// Whether a file of texts is one of conversations.
pub(crate) fn has_chats(file: &Path) -> bool {
    file.extension().is_some_and(|extension| extension == "jsonl")
}

/// The conversations of a file with one on each line.
pub(crate) fn read_chats(path: &Path) -> anyhow::Result<Vec<Conversation>> {
    let text = read_text(path)?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines
        .map(|(number, line)| {
            serde_json::from_str(line).with_context(|| {
                format!("line {} of {} is no conversation", number + 1, path.display())
            })
        })
        .collect()
}

/// The chat template of the first of `sources` that has one.
pub(crate) fn chat_template(sources: &[&Model]) -> anyhow::Result<ChatTemplate> {
    let mut found = sources.iter().map(|source| source.chat_template());
    let first = found.next().context("there is no model for a template")?;
    Ok(first.or_else(|error| found.find_map(Result::ok).ok_or(error))?)
}

/// The ids of each conversation of `file` with its answers, in the template of `sources`.
pub(crate) fn chat_ids(
    file: &Path,
    sources: &[&Model],
    tokenizer: &Tokenizer,
) -> anyhow::Result<Vec<Vec<u32>>> {
    let template = chat_template(sources)?;
    let chats = read_chats(file)?;
    let encoded = (1..).zip(&chats).map(|(number, chat)| {
        template.encode(chat, tokenizer).with_context(|| numbered(number, file))
    });
    encoded.collect()
}

/// The ids of a text, or those of each conversation where the file ends in .jsonl.
pub(crate) fn text_ids(
    file: &Path,
    sources: &[&Model],
    tokenizer: &Tokenizer,
    added: AddedTokens,
) -> anyhow::Result<Vec<Vec<u32>>> {
    match has_chats(file) {
        true => chat_ids(file, sources, tokenizer),
        false => Ok(vec![tokenizer.encode(&read_text(file)?, added)?]),
    }
}

/// What a conversation of `file` is called in errors.
pub(crate) fn numbered(number: usize, file: &Path) -> String {
    format!("conversation {number} of {}", file.display())
}

/// What ranges remember of a text.
pub(crate) fn text_hash(file: &Path) -> anyhow::Result<TextHash> {
    let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(TextHash { name, sha256: sha256(&fs_err::read(file)?) })
}
