use crate::printer::Printer;
use crate::source::{Generators, OrtArgs, RunnerKind, Source, read_text};
use anyhow::{Context as _, bail};
use clap::Args;
use firesteel_generate::{
    AddedTokens, Conversation, Event, GenerateOptions, Generation, Generator, Message, MessageRole,
    SamplingOptions, StepStats, StopReason, Tokenizer,
};
use firesteel_step::{Logits, StepOptions, StepSpec};
use firesteel_tensor::DType;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;

/// Generate text.
///
/// The text goes to stdout as it is made, times go to stderr.
#[derive(Debug, Args)]
pub(crate) struct Generate {
    /// Checkpoint or artifact
    path: PathBuf,
    /// The prompt; with --chat the user's message
    #[arg(long, value_name = "TEXT", required_unless_present_any = ["prompt_file", "messages"])]
    #[arg(allow_hyphen_values = true)]
    prompt: Option<String>,
    /// File with the prompt
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "messages"])]
    prompt_file: Option<PathBuf>,
    /// Put the prompt through the chat template
    #[arg(long)]
    chat: bool,
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
    max_tokens: usize,
    /// Divides the logits; 0 takes the most probable token [default: the model's advice]
    #[arg(long)]
    temperature: Option<f32>,
    /// Keep the most probable tokens up to this probability [default: the model's advice]
    #[arg(long)]
    top_p: Option<f32>,
    /// Keep this many of the most probable tokens; 0 keeps all [default: the model's advice]
    #[arg(long)]
    top_k: Option<usize>,
    /// Start of the random numbers
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    processors: Processors,
    /// Print the log-probabilities of each token and of the N most probable ones; needs --json
    #[arg(long, value_name = "N", requires = "json")]
    top_logprobs: Option<usize>,
    /// Write a file with a line of JSON for each step, and a summary, to this folder
    #[arg(long, value_name = "DIR", env = "FIRESTEEL_STEP_STATS_DIR")]
    step_stats: Option<PathBuf>,
    /// Who executes the steps [default: cpu for a checkpoint, evaluator for an artifact]
    #[arg(long, value_enum)]
    runner: Option<RunnerKind>,
    #[command(flatten)]
    ort: OrtArgs,
    /// Context of a checkpoint; an artifact has its own [default: the prompt and --max-tokens]
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// Print JSON with ids, text, stop reason and times, at the end
    #[arg(long)]
    json: bool,
}

/// What changes or ends the text, besides the options of every model's advice.
#[derive(Debug, Args)]
struct Processors {
    /// Keep the tokens at least this times as probable as the most probable one [default: the
    /// model's advice]
    #[arg(long)]
    min_p: Option<f32>,
    /// Divides the logits of tokens in prompt or text; 1 changes nothing [default: the model's
    /// advice]
    #[arg(long)]
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
    #[arg(long, value_name = "N")]
    min_tokens: Option<usize>,
    /// Stop before this text; may be repeated
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    stop: Vec<String>,
    /// Stop at this id; may be repeated
    #[arg(long, value_name = "ID")]
    stop_id: Vec<u32>,
}

fn logit_bias(text: &str) -> Result<(u32, f32), String> {
    let parts = text
        .split_once('=')
        .and_then(|(id, bias)| Some((id.trim().parse().ok()?, bias.trim().parse().ok()?)));
    parts.ok_or_else(|| "an id, =, and a number are accepted, such as 17=-2.5".to_owned())
}

/// Prompt tokens that a checkpoint's runner takes at once.
const PREFILL: usize = 64;

impl Generate {
    pub(crate) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        let source = Source::open(&self.path, printer)?;
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
        if self.context.is_some_and(|context| context > config.max_position_embeddings) {
            printer.warn(&format!(
                "the context is beyond the {} positions that the model claims",
                config.max_position_embeddings
            ));
        }
        let ids = self.prompt_ids(&source, &tokenizer)?;
        let options = GenerateOptions {
            max_tokens: Some(self.max_tokens),
            sampling: self.sampling(&tokenizer, printer)?,
            stop: self.processors.stop.clone(),
            stop_ids: self.processors.stop_id.clone(),
            top_logprobs: self.top_logprobs,
        };
        let kind = self.runner.unwrap_or(source.default_runner(true));
        let spec = match &source {
            Source::Artifact(artifact) => artifact.manifest().contract()?,
            Source::Checkpoint(_) => StepSpec::new(
                &config,
                &StepOptions {
                    tokens: 1,
                    context: self.context.unwrap_or_else(|| {
                        let wanted = ids.len().saturating_add(self.max_tokens).max(PREFILL);
                        wanted.min(config.max_position_embeddings)
                    }),
                    layers: 0..config.num_layers(),
                    cache_layout: Default::default(),
                    logits: Logits::Last,
                    dtype: DType::F32,
                },
            )?,
        };
        if spec.tokens != 1 {
            bail!(
                "the artifact takes {} tokens a step; one for decoding has --tokens 1",
                spec.tokens
            );
        }
        if spec.logits == Logits::Hidden {
            bail!("the artifact has no vocabulary projection; export without --no-lm-head");
        }
        let Some(embedding) = source.embedding()? else {
            bail!("the artifact has no embedding table; export with --embedding");
        };
        let chunk = spec.with_tokens(PREFILL.min(spec.context))?;
        let Generators { mut decode, mut prefill } =
            source.generators(kind, &spec, &chunk, &self.ort)?;
        let mut generator = Generator::new(&config, decode.as_mut(), embedding.as_ref())?
            .with_tokenizer(&tokenizer);
        if let Some(prefill) = prefill.as_mut().filter(|_| chunk.tokens > 1) {
            generator = generator.with_prefill(prefill.as_mut())?;
        }
        let mut step_stats = match &self.step_stats {
            Some(directory) => Some(StepStats::create(directory)?),
            None => None,
        };
        if let Some(stats) = &mut step_stats {
            generator = generator.with_step_stats(stats);
        }
        let mut failed = None;
        let generation = generator.generate(&ids, &options, &mut |event| {
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
        });
        match step_stats.map(StepStats::finish) {
            Some(Ok((path, _))) => printer.talk(&format!("steps: {}", path.display())),
            Some(Err(error)) => printer.warn(&format!("the steps are not complete: {error}")),
            None => {}
        }
        let generation = generation?;
        if let Some(error) = failed {
            return Err(error.into());
        }
        if self.json {
            printer.json(&generation)?;
        } else {
            printer.data("\n")?;
        }
        report(&generation, printer);
        Ok(ExitCode::SUCCESS)
    }

    fn prompt_ids(&self, source: &Source, tokenizer: &Tokenizer) -> anyhow::Result<Vec<u32>> {
        let conversation = if let Some(file) = &self.messages {
            let text = read_text(file)?;
            let mut conversation: Conversation = serde_json::from_str(&text)
                .with_context(|| format!("{} is no conversation", file.display()))?;
            conversation.add_generation_prompt = true;
            Some(conversation)
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
            messages.push(Message::text(MessageRole::User, self.prompt_text()?));
            Some(Conversation {
                messages,
                tools,
                add_generation_prompt: true,
                enable_thinking: None,
            })
        } else {
            None
        };
        match conversation {
            Some(mut conversation) => {
                if self.no_thinking {
                    conversation.enable_thinking = Some(false);
                }
                Ok(source.chat_template()?.encode(&conversation, tokenizer)?)
            }
            None => Ok(tokenizer.encode(&self.prompt_text()?, AddedTokens::Parse)?),
        }
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
                printer.warn(&format!("generation_config.json: {setting} is not applied"));
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

fn report(generation: &Generation, printer: &mut Printer) {
    let stats = &generation.stats;
    let rate = |rate: Option<f64>| rate.map_or("-".to_owned(), |rate| format!("{rate:.1}"));
    let first = stats.time_to_first_token_seconds;
    printer.talk(&format!(
        "{} prompt tokens at {} tokens/s, first token after {} s; {} tokens at {} tokens/s; {}",
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
