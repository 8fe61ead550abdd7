use crate::printer::Printer;
use crate::source::{OrtArgs, RunnerKind, Source};
use anyhow::{Context as _, bail};
use clap::Args;
use firesteel_generate::{
    AddedTokens, ChatTemplate, Conversation, Event, GenerateOptions, Generation, Generator,
    Message, MessageRole, SamplingOptions, Tokenizer,
};
use firesteel_step::{Logits, StepOptions, StepSpec};
use firesteel_tensor::DType;
use fs_err as fs;
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
    prompt: Option<String>,
    /// File with the prompt
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "messages"])]
    prompt_file: Option<PathBuf>,
    /// Put the prompt through the chat template
    #[arg(long)]
    chat: bool,
    /// System message of the chat
    #[arg(long, value_name = "TEXT", requires = "chat")]
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
    /// Who executes the steps [default: engine for a checkpoint, evaluator for an artifact]
    #[arg(long, value_enum)]
    runner: Option<RunnerKind>,
    #[command(flatten)]
    ort: OrtArgs,
    /// Context of a checkpoint; an artifact has its own
    #[arg(long, value_name = "N", default_value_t = 4096)]
    context: usize,
    /// Print JSON with ids, text, stop reason and times, at the end
    #[arg(long)]
    json: bool,
}

/// Prompt tokens that the engine takes at once.
const PREFILL: usize = 32;

impl Generate {
    pub(crate) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        let source = Source::open(&self.path, printer)?;
        let folder = source.folder().context("the weights are in no folder")?;
        let tokenizer = Tokenizer::open(folder)?;
        let config = source.config()?;
        let ids = self.prompt_ids(folder, &tokenizer)?;
        let options = GenerateOptions {
            max_tokens: Some(self.max_tokens),
            sampling: self.sampling(&tokenizer, printer),
        };
        let kind = self.runner.unwrap_or(source.default_runner());
        let spec = match &source {
            Source::Artifact(artifact) => artifact.manifest().contract()?,
            Source::Checkpoint(_) => StepSpec::new(
                &config,
                &StepOptions {
                    tokens: 1,
                    context: self.context,
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
        let mut decode = source.runner(kind, Some(&spec), false, &self.ort)?;
        let chunk = spec.with_tokens(PREFILL)?;
        let mut prefill = match (&source, kind) {
            (Source::Checkpoint(_), RunnerKind::Engine) => {
                Some(source.runner(kind, Some(&chunk), false, &self.ort)?)
            }
            _ => None,
        };
        let mut generator = Generator::new(&config, decode.as_mut(), embedding.as_ref())?
            .with_tokenizer(&tokenizer);
        if let Some(prefill) = &mut prefill {
            generator = generator.with_prefill(prefill.as_mut())?;
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
        Ok(ExitCode::SUCCESS)
    }

    fn prompt_ids(
        &self,
        folder: &std::path::Path,
        tokenizer: &Tokenizer,
    ) -> anyhow::Result<Vec<u32>> {
        let conversation = if let Some(file) = &self.messages {
            let text = fs::read_to_string(file)?;
            let mut conversation: Conversation = serde_json::from_str(&text)
                .with_context(|| format!("{} is no conversation", file.display()))?;
            conversation.add_generation_prompt = true;
            Some(conversation)
        } else if self.chat {
            let tools = match &self.tools {
                None => Vec::new(),
                Some(file) => serde_json::from_str(&fs::read_to_string(file)?)
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
                Ok(ChatTemplate::open(folder)?.encode(&conversation, tokenizer)?)
            }
            None => Ok(tokenizer.encode(&self.prompt_text()?, AddedTokens::Parse)?),
        }
    }

    fn prompt_text(&self) -> anyhow::Result<String> {
        match (&self.prompt, &self.prompt_file) {
            (Some(text), _) => Ok(text.clone()),
            (None, Some(file)) => Ok(fs::read_to_string(file)?),
            (None, None) => bail!("--prompt or --prompt-file is needed"),
        }
    }

    /// The model's advice, with what the command line says instead.
    fn sampling(&self, tokenizer: &Tokenizer, printer: &mut Printer) -> SamplingOptions {
        let advice = tokenizer.generation_config();
        if self.temperature.is_none() {
            for setting in &advice.unsupported {
                printer.warn(&format!("generation_config.json: {setting} is not applied"));
            }
        }
        let defaults = advice.sampling;
        SamplingOptions {
            temperature: self.temperature.unwrap_or(defaults.temperature),
            top_p: self.top_p.unwrap_or(defaults.top_p),
            top_k: self.top_k.unwrap_or(defaults.top_k),
            seed: self.seed,
        }
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
            firesteel_generate::StopReason::EndOfSequence => "stopped at an end token",
            firesteel_generate::StopReason::MaxTokens => "stopped at --max-tokens",
            firesteel_generate::StopReason::ContextFull => "stopped because the context is full",
            firesteel_generate::StopReason::Cancelled => "stopped by the reader",
        }
    ));
}
