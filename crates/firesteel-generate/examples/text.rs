//! Encodes, decodes and renders what lines of JSON on stdin ask for, with the tokenizer and the chat
//! template of a folder or a GGUF file. `scripts/tokenizer-check` compares the answers with Python's.
//!
//!     cargo run -p firesteel-generate --example text -- PATH
//!
//! | line | answer |
//! |---|---|
//! | `{"text": "…"}` | `plain` and `parsed`: the ids without and with added tokens read in it; `texts`: what both decode to |
//! | `{"ids": […]}` | `text`: what they decode to |
//! | `{"conversation": {…}, "time": seconds}` | `text`: the prompt at that time since 1970; `ids`; or `error` |

use firesteel_checkpoint::Checkpoint;
use firesteel_generate::{
    AddedTokens, ChatTemplate, Conversation, GenerateError, LocalTime, Tokenizer,
};
use serde::Deserialize;
use serde_json::{Value, json};
use std::error::Error;
use std::io::{BufRead, Write};
use std::path::Path;
use std::time::{Duration, SystemTime};

#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Text { text: String },
    Ids { ids: Vec<u32> },
    Conversation { conversation: Conversation, time: f64 },
}

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("the path of a folder or GGUF file is needed")?;
    let path = Path::new(&path);
    let (tokenizer, mut template) = open(path)?;
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let answer = match serde_json::from_str(&line?)? {
            Line::Text { text } => {
                let plain = tokenizer.encode(&text, AddedTokens::AsText)?;
                let parsed = tokenizer.encode(&text, AddedTokens::Parse)?;
                let texts = [tokenizer.decode(&plain), tokenizer.decode(&parsed)];
                json!({"plain": plain, "parsed": parsed, "texts": texts})
            }
            Line::Ids { ids } => json!({"text": tokenizer.decode(&ids)}),
            Line::Conversation { conversation, time } => {
                let time = SystemTime::UNIX_EPOCH + Duration::try_from_secs_f64(time)?;
                template = template.with_time(LocalTime::of(time).ok_or("no such year")?);
                prompt(&template, &conversation, &tokenizer)
                    .unwrap_or_else(|error| json!({"error": error.to_string()}))
            }
        };
        writeln!(out, "{answer}")?;
    }
    Ok(())
}

fn open(path: &Path) -> Result<(Tokenizer, ChatTemplate), Box<dyn Error>> {
    if path.is_dir() {
        return Ok((Tokenizer::open(path)?, ChatTemplate::open(path)?));
    }
    let checkpoint = Checkpoint::open(path)?;
    let tokenizer = checkpoint.gguf_tokenizer()?.ok_or("the file has no tokenizer")?;
    Ok((Tokenizer::from_gguf(&tokenizer, path)?, ChatTemplate::from_gguf(&tokenizer, path)?))
}

fn prompt(
    template: &ChatTemplate,
    conversation: &Conversation,
    tokenizer: &Tokenizer,
) -> Result<Value, GenerateError> {
    let text = template.render(conversation)?;
    Ok(json!({"text": text, "ids": template.encode(conversation, tokenizer)?}))
}
