use crate::printer::Printer;
use crate::source::{self, OrtArgs, decoder, kv_format, runner_names};
use crate::texts::{TEXT_LIMIT, read_text};
use anyhow::{Context as _, bail};
use clap::Args;
use firesteel_checkpoint::ModelConfig;
use firesteel_engine::KvFormat;
use firesteel_generate::{
    AddedTokens, Answer, AnswerOptions, ChatTemplate, Content, Conversation, Event, GenerateError,
    GenerateOptions, Generation, Generator, Message, MessageRole, PromptLookup, SamplingOptions,
    StepStats, StopReason, Syntax, Tokenizer,
};
use firesteel_model::{DecoderOptions, Model, RunnerKind};
use std::ffi::OsString;
use std::io::{BufRead as _, IsTerminal as _, Read as _};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;

/// Generate text.
///
/// The text goes to stdout as it is made, times go to stderr.
#[derive(Debug, Args)]
pub(crate) struct Generate {
    /// Checkpoint or artifact
    path: PathBuf,
    /// The prompt; with --chat the user's message
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    #[arg(required_unless_present_any = ["prompt_file", "messages", "interactive"])]
    prompt: Option<String>,
    /// File with the prompt
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "messages"])]
    prompt_file: Option<PathBuf>,
    /// Put the prompt through the chat template
    #[arg(long)]
    chat: bool,
    /// Chat turn by turn: each line of stdin is a message of the user, after the prompt if there
    /// is one
    #[arg(long, requires = "chat", conflicts_with_all = ["tools", "messages"])]
    interactive: bool,
    /// System message of the chat
    #[arg(long, value_name = "TEXT", requires = "chat", allow_hyphen_values = true)]
    system: Option<String>,
    /// JSON file with the tools that the chat may call, as in the OpenAI interface
    #[arg(long, value_name = "FILE", requires = "chat")]
    tools: Option<PathBuf>,
    /// JSON file with a whole conversation: {"messages": […], "tools": […]}
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "chat"])]
    messages: Option<PathBuf>,
    /// Let the model answer without thinking first
    #[arg(long)]
    no_thinking: bool,
    /// Most tokens to generate
    #[arg(long, value_name = "N", default_value_t = 256)]
    #[arg(value_parser = whole::<usize>, allow_negative_numbers = true)]
    max_tokens: usize,
    /// Divides the logits; 0 takes the most probable token [default: the model's advice]
    #[arg(long, allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Keep the most probable tokens up to this probability [default: the model's advice]
    #[arg(long, allow_negative_numbers = true)]
    top_p: Option<f32>,
    /// Keep this many of the most probable tokens; 0 or -1 keeps all [default: the model's advice]
    #[arg(long, value_parser = top_k, allow_negative_numbers = true)]
    top_k: Option<usize>,
    /// Start of the random numbers
    #[arg(long, default_value_t = 0, value_parser = whole::<u64>, allow_negative_numbers = true)]
    seed: u64,
    /// Run up to N tokens at once where the text repeats itself; the text stays the same
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "10")]
    #[arg(value_parser = whole::<usize>, allow_negative_numbers = true)]
    prompt_lookup: Option<usize>,
    #[command(flatten)]
    processors: Processors,
    /// Print the log-probabilities of each token and of the N most probable ones; needs --json
    #[arg(long, value_name = "N", requires = "json")]
    #[arg(value_parser = whole::<usize>, allow_negative_numbers = true)]
    top_logprobs: Option<usize>,
    /// Write a file with a line of JSON for each step, and a summary, to this folder; none when it
    /// is empty
    #[arg(long, value_name = "DIR", env = "FIRESTEEL_STEP_STATS_DIR")]
    step_stats: Option<OsString>,
    /// Who executes the steps [default: cpu for a checkpoint, evaluator for an artifact]
    #[arg(long, value_parser = runner_names())]
    runner: Option<RunnerKind>,
    #[command(flatten)]
    ort: OrtArgs,
    /// The cpu runner stores keys and values in this format: f32, f16 or q8 [default: f16]
    #[arg(long, value_name = "FORMAT")]
    kv: Option<KvFormat>,
    /// Context of a checkpoint; an artifact has its own [default: the prompt and --max-tokens; 4096
    /// with --interactive]
    #[arg(long, value_name = "N", value_parser = whole::<usize>, allow_negative_numbers = true)]
    context: Option<usize>,
    /// Print JSON with ids, text, stop reason and times, at the end of each answer
    #[arg(long)]
    json: bool,
}

/// What changes or ends the text, besides the options of every model's advice.
#[derive(Debug, Args)]
struct Processors {
    /// Keep the tokens at least this times as probable as the most probable one [default: the
    /// model's advice]
    #[arg(long, allow_negative_numbers = true)]
    min_p: Option<f32>,
    /// Divides the logits of tokens in prompt or text; 1 changes nothing [default: the model's
    /// advice]
    #[arg(long, allow_negative_numbers = true)]
    repetition_penalty: Option<f32>,
    /// Is taken from the logits of tokens in the text
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    presence_penalty: f32,
    /// Is taken from a logit for each time that the token is in the text
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    frequency_penalty: f32,
    /// Is added to the logits of these ids
    #[arg(long, value_name = "ID=BIAS", value_delimiter = ',', value_parser = logit_bias)]
    logit_bias: Vec<(u32, f32)>,
    /// Text that is not to be generated; may be repeated
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    bad_word: Vec<String>,
    /// Fewest tokens before the model may end [default: the model's advice]
    #[arg(long, value_name = "N", value_parser = whole::<usize>, allow_negative_numbers = true)]
    min_tokens: Option<usize>,
    /// Stop before this text; may be repeated
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    stop: Vec<String>,
    /// Stop at this id; may be repeated
    #[arg(long, value_name = "ID", value_parser = whole::<u32>, allow_negative_numbers = true)]
    stop_id: Vec<u32>,
}

fn logit_bias(text: &str) -> Result<(u32, f32), String> {
    let parts = text
        .split_once('=')
        .and_then(|(id, bias)| Some((id.trim().parse().ok()?, bias.trim().parse().ok()?)));
    parts.ok_or_else(|| "an id, =, and a number are accepted, such as 17=-2.5".to_owned())
}

fn whole<T: FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| "a whole number from 0 is accepted".to_owned())
}

/// Both -1 and 0 are in use for "all".
fn top_k(text: &str) -> Result<usize, String> {
    match text {
        "-1" => Ok(0),
        _ => text.parse().map_err(|_| "a whole number from -1 is accepted".to_owned()),
    }
}

/// Prompt tokens that a checkpoint's runner takes at once.
const PREFILL: usize = 64;

/// Context of a chat whose length is not known.
const CHAT_CONTEXT: usize = 4096;

impl Generate {
    pub(crate) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        let source = source::open(&self.path, printer)?;
        let Some(tokenizer) = source.tokenizer()? else {
            bail!(
                "{} has no tokenizer; a folder needs tokenizer.json, a GGUF file tokenizer.ggml.*",
                self.path.display()
            );
        };
        let config = source.config()?;
        if self.no_thinking && !self.chat && self.messages.is_none() {
            bail!("--no-thinking goes with --chat or --messages; a plain prompt says it itself");
        }
        let kind = self.runner.unwrap_or(source.default_runner(true));
        let kv = kv_format("--kv", self.kv, kind)?.unwrap_or_default();
        self.ort.refuse_unused(&[kind])?;
        if let (Some(context), Some(manifest)) = (self.context, source.manifest()) {
            bail!(
                "--context {context}: the artifact has a context of {}; export it with another, or \
                 leave --context out",
                manifest.contract()?.context
            );
        }
        if self.context.is_some_and(|context| context > config.max_position_embeddings) {
            printer.warn(&format!(
                "the context is beyond the {} positions that the model claims",
                config.max_position_embeddings
            ));
        }
        let chat = self.chat(&source)?;
        let prompt = match &chat {
            // The first turn is still to be read.
            Some(_) if self.interactive && self.prompt.is_none() && self.prompt_file.is_none() => {
                None
            }
            Some(chat) => Some(chat.template.encode(&chat.conversation, &tokenizer)?),
            None => Some(tokenizer.encode(&self.prompt_text()?, AddedTokens::Parse)?),
        };
        let prompt_lookup = self
            .prompt_lookup
            .map(|max_tokens| PromptLookup { max_tokens, ..PromptLookup::default() });
        let options = GenerateOptions {
            max_tokens: Some(self.max_tokens),
            sampling: self.sampling(&tokenizer, printer)?,
            stop: self.processors.stop.clone(),
            stop_ids: self.processors.stop_id.clone(),
            top_logprobs: self.top_logprobs,
            prompt_lookup,
        };
        let context = self.context(&config, prompt.as_ref().map_or(0, Vec::len));
        let spec = source.decode_step(context)?;
        let runner = self.ort.options()?;
        let wanted = DecoderOptions {
            kind,
            runner: &runner,
            prompt: PREFILL,
            all_logits: self.prompt_lookup.map_or(0, |proposal| proposal.saturating_add(1)),
            kv,
        };
        let decoder = decoder(&source, &spec, &wanted, printer)?;
        if self.prompt_lookup.is_some() && !decoder.gives_all_logits(2) {
            printer.warn("--prompt-lookup does nothing: the artifact takes one token a step");
        }
        let directory = self.step_stats.as_ref().filter(|directory| !directory.is_empty());
        let mut step_stats = directory.map(|it| StepStats::create(Path::new(it))).transpose()?;
        let mut generator = Generator::new(&config, decoder)?.with_tokenizer(&tokenizer);
        if self.interactive {
            generator = generator.with_prompt_cache();
        }
        if let Some(stats) = &mut step_stats {
            generator = generator.with_step_stats(stats);
        }
        let mut session = Session { generator, tokenizer: &tokenizer, options, chat };
        let outcome = self.turns(&mut session, prompt, printer);
        drop(session);
        match step_stats.map(StepStats::finish) {
            Some(Ok((path, _))) => printer.talk(&format!("steps: {}", path.display())),
            Some(Err(error)) => printer.warn(&format!("the steps are not complete: {error}")),
            None => {}
        }
        outcome?;
        Ok(ExitCode::SUCCESS)
    }

    /// The context of a checkpoint, with room for `prompt` tokens; an artifact has its own.
    fn context(&self, config: &ModelConfig, prompt: usize) -> usize {
        let room = prompt.saturating_add(self.max_tokens).max(PREFILL);
        let wanted = if self.interactive { room.max(CHAT_CONTEXT) } else { room };
        self.context.unwrap_or(wanted.min(config.max_position_embeddings))
    }

    /// Answers `prompt`, and in an interactive chat every line of stdin after it.
    fn turns(
        &self,
        session: &mut Session<'_>,
        prompt: Option<Vec<u32>>,
        printer: &mut Printer,
    ) -> anyhow::Result<()> {
        if !self.interactive {
            if let Some(prompt) = prompt {
                self.answer(session, &prompt, printer)?;
            }
            return Ok(());
        }
        // Whether a turn of the user is to be answered.
        let mut waiting = prompt.is_some();
        let mut unanswered = 0usize;
        while waiting || session.read_turn(printer)? {
            waiting = false;
            let Some(ids) = session.next_prompt(printer) else {
                unanswered += 1;
                continue;
            };
            let generation = self.answer(session, &ids, printer)?;
            if let Some(chat) = &mut session.chat {
                let text = generation.text.unwrap_or_default();
                let tools = &chat.conversation.tools;
                let in_thought = chat.syntax.prompt_opens_thought(&session.tokenizer.decode(&ids));
                let options = AnswerOptions { syntax: chat.syntax, tools, in_thought };
                let answer = Answer::read(&text, &options);
                chat.conversation.messages.push(answer.into());
            }
        }
        match unanswered {
            0 => Ok(()),
            1 => bail!("one message of the chat was left out and has no answer"),
            _ => bail!("{unanswered} messages of the chat were left out and have no answers"),
        }
    }

    /// Generates after `prompt` and prints it.
    fn answer(
        &self,
        session: &mut Session<'_>,
        prompt: &[u32],
        printer: &mut Printer,
    ) -> anyhow::Result<Generation> {
        let mut failed = None;
        let generation = session.generator.generate(prompt, &session.options, &mut |event| {
            let text = match event {
                Event::Token { text, .. } | Event::Tail { text } => text,
                Event::Prefill { .. } => "",
            };
            if self.json || text.is_empty() {
                return ControlFlow::Continue(());
            }
            match printer.data(text) {
                Ok(()) => ControlFlow::Continue(()),
                Err(error) => {
                    failed = Some(error);
                    ControlFlow::Break(())
                }
            }
        })?;
        if let Some(error) = failed {
            return Err(error.into());
        }
        if self.json {
            printer.json(&generation)?;
        } else {
            printer.data("\n")?;
        }
        report(&generation, printer);
        Ok(generation)
    }

    /// The chat that the command line asks for, with what is said already.
    fn chat(&self, source: &Model) -> anyhow::Result<Option<Chat>> {
        let mut conversation: Conversation = if let Some(file) = &self.messages {
            serde_json::from_str(&read_text(file)?)
                .with_context(|| format!("{} is no conversation", file.display()))?
        } else if self.chat {
            let tools = match &self.tools {
                None => Vec::new(),
                Some(file) => serde_json::from_str(&read_text(file)?)
                    .with_context(|| format!("{} is no JSON list of tools", file.display()))?,
            };
            let mut messages = Vec::new();
            if let Some(system) = &self.system {
                messages.push(Message::text(MessageRole::System, system));
            }
            if self.prompt.is_some() || self.prompt_file.is_some() {
                messages.push(Message::text(MessageRole::User, self.prompt_text()?));
            }
            Conversation { messages, tools, ..Conversation::default() }
        } else {
            return Ok(None);
        };
        conversation.add_generation_prompt = true;
        if self.no_thinking {
            conversation.enable_thinking = Some(false);
        }
        let family = source.config()?.family;
        let syntax = Syntax::of(family.model_type())
            .with_context(|| format!("the answers of {family} models cannot be read"))?;
        Ok(Some(Chat { template: source.chat_template()?, conversation, syntax }))
    }

    fn prompt_text(&self) -> anyhow::Result<String> {
        match (&self.prompt, &self.prompt_file) {
            (Some(text), _) => Ok(text.clone()),
            (None, Some(file)) => read_text(file),
            (None, None) => bail!("--prompt or --prompt-file is needed"),
        }
    }

    /// The model's advice, with what the command line says instead.
    fn sampling(
        &self,
        tokenizer: &Tokenizer,
        printer: &mut Printer,
    ) -> anyhow::Result<SamplingOptions> {
        let advice = tokenizer.generation_config();
        if self.temperature.is_none() {
            for setting in &advice.unsupported {
                printer.warn(&format!("{setting} is not applied"));
            }
        }
        let defaults = advice.sampling.clone();
        let processors = &self.processors;
        let mut bad_words = defaults.bad_words;
        for word in &processors.bad_word {
            bad_words.extend(tokenizer.bad_word(word)?);
        }
        Ok(SamplingOptions {
            temperature: self.temperature.unwrap_or(defaults.temperature),
            top_p: self.top_p.unwrap_or(defaults.top_p),
            top_k: self.top_k.unwrap_or(defaults.top_k),
            min_p: processors.min_p.unwrap_or(defaults.min_p),
            repetition_penalty: processors
                .repetition_penalty
                .unwrap_or(defaults.repetition_penalty),
            presence_penalty: processors.presence_penalty,
            frequency_penalty: processors.frequency_penalty,
            logit_bias: processors.logit_bias.iter().copied().collect(),
            bad_words,
            min_tokens: processors.min_tokens.unwrap_or(defaults.min_tokens),
            seed: self.seed,
        })
    }
}

/// A conversation and what makes a prompt of it.
struct Chat {
    template: ChatTemplate,
    conversation: Conversation,
    syntax: Syntax,
}

/// Characters of a turn that is dropped by which the user knows it again.
const SHOWN: usize = 40;

/// Removes the oldest turn, what the user said and the answer, and returns the beginning of what the
/// user said. The user's last message stays, and so does what the system says.
fn drop_oldest_turn(messages: &mut Vec<Message>) -> Option<String> {
    let mut users = (0..messages.len()).filter(|&index| messages[index].role == MessageRole::User);
    let (first, second) = (users.next()?, users.next()?);
    let text = match &messages[first].content {
        Some(Content::Text(text)) => text.as_str(),
        _ => "",
    };
    let mut shown: String = text.chars().take(SHOWN).collect();
    if shown.len() < text.len() {
        shown.push('…');
    }
    let mut index = 0;
    messages.retain(|message| {
        let dropped = (first..second).contains(&index) && message.role != MessageRole::System;
        index += 1;
        !dropped
    });
    Some(shown)
}

/// A generation after the other.
struct Session<'a> {
    generator: Generator<'a>,
    tokenizer: &'a Tokenizer,
    options: GenerateOptions,
    chat: Option<Chat>,
}

impl Session<'_> {
    /// Takes the next line of stdin that is not blank as the user's turn; `false` after the last
    /// line.
    fn read_turn(&mut self, printer: &mut Printer) -> anyhow::Result<bool> {
        let Some(chat) = &mut self.chat else { return Ok(false) };
        let mut line = String::new();
        while line.trim().is_empty() {
            if std::io::stdin().is_terminal() {
                printer.talk("Your turn (Ctrl-D ends the chat):");
            }
            line.clear();
            let read = std::io::stdin().lock().take(TEXT_LIMIT + 1).read_line(&mut line);
            let read = read.context("stdin cannot be read as text")?;
            if read as u64 > TEXT_LIMIT {
                bail!("a line of stdin is longer than {TEXT_LIMIT} bytes");
            }
            if read == 0 {
                return Ok(false);
            }
        }
        let text = line.trim_end_matches(['\r', '\n']);
        chat.conversation.messages.push(Message::text(MessageRole::User, text));
        Ok(true)
    }

    /// The prompt of the chat, whose last message is the user's. Where it has outgrown the context,
    /// the oldest turns are dropped for good. `None` if the last message does not even fit alone; it
    /// is left out then, and the chat is as before it.
    fn next_prompt(&mut self, printer: &mut Printer) -> Option<Vec<u32>> {
        let chat = self.chat.as_mut()?;
        let context = self.generator.context();
        // A turn that is dropped has all that follows run anew, so they are dropped for more than
        // one answer at a time.
        let quarter = context / 4;
        let answer = self.options.max_tokens.unwrap_or(quarter).min(quarter);
        let mut kept = chat.conversation.clone();
        let mut dropped = Vec::new();
        let prompt = loop {
            let prompt = chat.template.encode(&kept, self.tokenizer);
            let room = if dropped.is_empty() { answer } else { quarter };
            if prompt.as_ref().is_ok_and(|ids| ids.len().saturating_add(room) <= context) {
                break prompt;
            }
            match drop_oldest_turn(&mut kept.messages) {
                Some(text) => dropped.push(format!("{text:?}")),
                None => break prompt,
            }
        };
        let prompt = match prompt {
            Ok(ids) if ids.len() > context => {
                Err(GenerateError::PromptTooLong { prompt: ids.len(), context })
            }
            prompt => prompt,
        };
        match prompt {
            Ok(ids) => {
                if !dropped.is_empty() {
                    let turns = match dropped.len() {
                        1 => "the oldest turn is".to_owned(),
                        count => format!("the {count} oldest turns are"),
                    };
                    printer.warn(&format!(
                        "the chat has outgrown the context of {context} tokens; {turns} dropped \
                         from it: {}",
                        dropped.join(", ")
                    ));
                }
                chat.conversation = kept;
                Some(ids)
            }
            Err(error) => {
                chat.conversation.messages.pop();
                printer.warn(&format!("{error}; the message is left out, and the chat goes on"));
                None
            }
        }
    }
}

fn report(generation: &Generation, printer: &mut Printer) {
    let stats = &generation.stats;
    let cached = match stats.cached_tokens {
        0 => String::new(),
        cached => format!(", {cached} of them cached,"),
    };
    let proposed = match stats.proposed_tokens {
        0 => String::new(),
        proposed => format!("; {} of {proposed} proposed tokens accepted", stats.accepted_tokens),
    };
    let rate = |rate: Option<f64>| rate.map_or("-".to_owned(), |rate| format!("{rate:.1}"));
    let first = stats.time_to_first_token_seconds;
    printer.talk(&format!(
        "{} prompt tokens{cached} at {} tokens/s, first token after {} s; {} tokens at {} \
         tokens/s{proposed}; {}",
        stats.prompt_tokens,
        rate(stats.prefill_tokens_per_second()),
        first.map_or("-".to_owned(), |seconds| format!("{seconds:.3}")),
        stats.generated_tokens,
        rate(stats.decode_tokens_per_second()),
        match generation.stop {
            StopReason::EndOfSequence => "stopped at an end token",
            StopReason::StopId(_) => "stopped at a --stop-id",
            StopReason::StopString(_) => "stopped at a --stop",
            StopReason::MaxTokens => "stopped at --max-tokens",
            StopReason::ContextFull => "stopped because the context is full",
            StopReason::Cancelled => "stopped by the reader",
        }
    ));
}
