//! `check step`: tensors of two runners, step by step.

use super::{Judged, Runners, Sides, Verdicts, announce, as_f32, decibels, print_settings};
use super::{Spread, spread_ids};
use crate::printer::{Printer, table};
use crate::texts::text_ids;
use anyhow::{Context as _, bail};
use clap::{Args, Parser};
use firesteel_artifact::Manifest;
use firesteel_check::{CheckOptions, CheckReport, Feed, GreedyReport, LogitsReport, Snr, compare};
use firesteel_compile::Measured;
use firesteel_export::{ExportOptions, Gelu, Precision};
use firesteel_generate::AddedTokens;
use firesteel_model::{Model, RunnerKind, RunnerOptions};
use firesteel_step::{
    Embedding, KvState, Logits, Role, Runner, RunnerError, StepError, StepOptions, StepSpec,
};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Compare the tensors of two runners, step by step.
///
/// Both get the same tokens; logits, hidden state after each layer, new keys and new values are
/// compared. Exit code 1 when something is below its bar.
#[derive(Debug, Args)]
pub(crate) struct CheckStep {
    #[command(flatten)]
    sides: Sides,
    #[command(flatten)]
    args: CheckArgs,
    /// Write the result into the manifest of the compiled artifact that is checked
    #[arg(long)]
    record: bool,
}

impl CheckStep {
    pub(crate) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        let (mut test, reference) = self.sides.open(printer)?;
        if self.record && !matches!(test, Model::Compiled(_)) {
            bail!("--record goes with a compiled artifact");
        }
        let json = self.sides.json;
        let report = check_and_print(&test, &reference, &self.args, !json, printer)?;
        let passed = report.passed;
        let mut verdicts = None;
        if let Model::Compiled(step) = &mut test {
            verdicts = Some(Verdicts::new(step, verdict(&report))?);
            if self.record {
                step.compiled.record(&step.step, measured(&report))?;
            }
        }
        match (json, &verdicts) {
            (true, _) => printer.json(&Judged { verdicts, report })?,
            (false, Some(verdicts)) => verdicts.print(printer)?,
            (false, None) => {}
        }
        Ok(ExitCode::from(u8::from(!passed)))
    }
}

#[derive(Debug, Clone, Args)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    runners: Runners,
    /// File with the text to run, or conversations where it ends in .jsonl [default: a text that is
    /// built in]
    #[arg(long, value_name = "FILE", conflicts_with = "ids")]
    prompt: Option<PathBuf>,
    /// Token ids to run
    #[arg(long, value_name = "ID,ID,…", value_delimiter = ',')]
    ids: Option<Vec<u32>>,
    /// Most tokens to run with teacher forcing
    #[arg(long, value_name = "N", default_value_t = 96)]
    steps: usize,
    /// Tokens of the greedy continuation; 0 for none [default: 32]
    #[arg(long, value_name = "N")]
    greedy: Option<usize>,
    /// Prompt tokens before the greedy continuation, at most half of the context [default: 16]
    #[arg(long, value_name = "N")]
    greedy_prompt: Option<usize>,
    /// SNR in dB that logits, entries and the state after each layer must reach, each over all
    /// steps [default: 110, 100 on ort and cpu, 40 for fp16, 35 for an approximate GELU, 30 for
    /// 8-bit weights, 10 for 4-bit weights or 8-bit activations]
    #[arg(long, value_name = "DB", allow_negative_numbers = true)]
    min_snr: Option<f64>,
    /// Share of the greedy continuation, ties left out, that must agree, such as 1
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    min_greedy: f64,
    /// Logit gap below which a greedy choice is a tie
    #[arg(long, value_name = "GAP", default_value_t = 1e-3)]
    tie_margin: f64,
    /// Leave out the hidden state after each layer
    #[arg(long)]
    no_layers: bool,
}

impl Default for CheckArgs {
    /// What an empty command line gives, so that `export --check` and `check step` cannot differ.
    fn default() -> Self {
        #[derive(Parser)]
        struct Alone {
            #[command(flatten)]
            args: CheckArgs,
        }
        Alone::parse_from(["check"]).args
    }
}

impl CheckArgs {
    /// Those of a run of `ids`, or of the text that is built in.
    pub(crate) fn of_tokens(ids: Option<Vec<u32>>, steps: usize) -> Self {
        Self { ids, steps, ..Self::default() }
    }

    fn greedy(&self) -> usize {
        self.greedy.unwrap_or(32)
    }

    fn greedy_prompt(&self) -> usize {
        self.greedy_prompt.unwrap_or(16)
    }

    /// Refuses numbers of tokens with which steps of `tokens` tokens do nothing.
    fn check_counts(&self, tokens: usize) -> anyhow::Result<()> {
        if self.steps < tokens {
            let s = if tokens == 1 { "" } else { "s" };
            bail!(
                "--steps {}: a step takes {tokens} token{s}; as many or more are accepted",
                self.steps
            );
        }
        if self.greedy_prompt == Some(0) {
            bail!(
                "--greedy-prompt 0: a continuation needs something to continue; 1 or more tokens \
                 are accepted, and --greedy 0 leaves it out"
            );
        }
        Ok(())
    }

    /// Says where the greedy continuation is another than what was asked for.
    fn tell_of_greedy(&self, greedy: &GreedyReport, context: usize, printer: &mut Printer) {
        let (prompt, tokens) = (greedy.prompt_tokens, greedy.tokens.len());
        if let Some(asked) = self.greedy_prompt.filter(|asked| *asked > prompt) {
            printer.warn(&format!(
                "the greedy continuation begins after {prompt} tokens, not after the {asked} of \
                 --greedy-prompt: it takes no more than there are, and half of the context of \
                 {context}"
            ));
        }
        if let Some(asked) = self.greedy.filter(|asked| *asked > tokens) {
            printer.warn(&format!(
                "the greedy continuation has {tokens} tokens, not the {asked} of --greedy: the \
                 context of {context} takes no more after {prompt} of the prompt"
            ));
        }
    }
}

/// Context of a comparison of two checkpoints, which bring none of their own.
const CHECKPOINT_CONTEXT: usize = 4096;

/// Run when neither text nor ids are given. Longer than the window of every test model.
const TEXT: &str = "A good tool says what it did and what it did not do. The old hands used to \
tell the story of a machine that never made an error, because nobody had ever asked it to show \
its work. One night a young programmer wrote a small routine that added every column twice, from \
the top and from the bottom, and printed a line only when the two sums differed. In the morning \
there were four hundred lines of paper on the floor. The machine had not become worse; it had \
only begun to be honest. They kept the routine, and they kept the paper too, as a reminder that \
a result which cannot be checked is a rumour, and that the cheapest time to find a fault is \
before anybody depends on it. Later the routine was given a name and a manual, and people who \
had never met its author came to trust it more than the machine it watched. Ask twice, they \
said, and write down both answers.";

/// What a compiled step's report says of its numbers.
fn verdict(report: &CheckReport) -> String {
    format!(
        "{} on the emulator: {} against {}, the bar is {} dB",
        if report.passed { "yes" } else { "NO" },
        decibels(&report.output),
        report.reference,
        report.min_snr
    )
}

/// What the manifest keeps of a comparison.
fn measured(report: &CheckReport) -> Measured {
    Measured {
        reference: report.reference.clone(),
        tokens: report.tokens,
        output_db: report.output.db,
        entries_db: report.entries.db,
        top1: report.logits.as_ref().and_then(|logits| logits.top1),
        kl_mean: report.logits.as_ref().map(|logits| logits.kl_mean),
        greedy: report
            .greedy
            .as_ref()
            .map(|greedy| (greedy.agreed, greedy.tokens.len() - greedy.ties)),
    }
}

/// Runs one step of zeros on the emulator and says how long all will take, before they begin.
fn estimate(
    runner: &mut dyn Runner,
    steps: usize,
    limit: Duration,
    printer: &mut Printer,
) -> anyhow::Result<()> {
    let spec = runner.spec().clone();
    let state = KvState::new(&spec)?;
    let step = state.prepare(&spec, &vec![0.0; spec.tokens * spec.hidden_size])?;
    let started = Instant::now();
    runner.step(&state.inputs(&spec, &step)?)?;
    announce(started.elapsed(), steps, limit, "--steps and --greedy", printer)
}

/// Compares `test` with `reference` and prints the result if `print`.
pub(crate) fn check_and_print(
    test: &Model,
    reference: &Model,
    args: &CheckArgs,
    print: bool,
    printer: &mut Printer,
) -> anyhow::Result<CheckReport> {
    let layers = !args.no_layers;
    let [test_kind, reference_kind] = args.runners.kinds([test, reference])?;
    // The step is the artifact's; a checkpoint follows it, in f32.
    let contract = match test.manifest().or(reference.manifest()) {
        Some(manifest) => manifest.contract()?,
        None => checkpoint_contract(test)?,
    };
    let spec = as_f32(&contract)?;
    args.check_counts(spec.tokens)?;
    let runner = args.runners.ort.options()?;
    let mut left = reference.runner(reference_kind, Some(&spec), layers, &runner)?;
    let mut right = test.runner(test_kind, Some(&spec), layers, &runner)?;
    let ids = token_ids(args, test, reference, &spec)?;
    let kinds = [test_kind, reference_kind];
    let min_snr = args.min_snr.unwrap_or_else(|| default_bar([test, reference], kinds));
    let numbers = [
        ("--min-snr", min_snr),
        ("--min-greedy", args.min_greedy),
        ("--tie-margin", args.tie_margin),
    ];
    for (option, value) in numbers {
        if !value.is_finite() {
            bail!("{option} {value}: a finite number is accepted");
        }
    }
    for source in [test, reference] {
        source.verify()?;
    }
    let options = CheckOptions {
        steps: Some(args.steps),
        greedy: args.greedy(),
        greedy_prompt: args.greedy_prompt(),
        tie_margin: args.tie_margin,
        min_snr,
        min_greedy: args.min_greedy,
    };
    let mut feed = feed(&spec, reference, test)?;
    if test_kind == RunnerKind::Htp {
        let forced = args.steps.min(ids.len()).min(spec.context) / spec.tokens;
        let prompt = args.greedy_prompt().div_ceil(spec.tokens);
        let greedy = if args.greedy() > 0 { prompt.saturating_add(args.greedy()) } else { 0 };
        let steps = forced.saturating_add(greedy.min(spec.context));
        estimate(right.as_mut(), steps, args.runners.ort.limits().time, printer)?;
    }
    let report = compare(left.as_mut(), right.as_mut(), feed.as_mut(), &ids, &options)?;
    if report.tokens < ids.len().min(args.steps) {
        printer.warn(&format!(
            "{} of {} tokens were run: a context of {} in steps of {} takes no more",
            report.tokens,
            ids.len().min(args.steps),
            spec.context,
            spec.tokens
        ));
    }
    if let Some(greedy) = &report.greedy {
        args.tell_of_greedy(greedy, spec.context, printer);
    }
    if report.steps.len() == 1 && spec.tokens > 1 {
        printer.warn("one step was run, on an empty cache; give more tokens or a larger context");
    }
    if print {
        print_report(&report, &spec, printer)?;
    }
    Ok(report)
}

fn checkpoint_contract(source: &Model) -> anyhow::Result<StepSpec> {
    let config = source.config()?;
    let context = CHECKPOINT_CONTEXT.min(config.max_position_embeddings);
    Ok(StepSpec::new(&config, &StepOptions::decode(&config, context))?)
}

/// The bar for what the artifacts' options and the runners' arithmetic can hold.
pub(crate) fn default_bar(sources: [&Model; 2], kinds: [RunnerKind; 2]) -> f64 {
    // What rounds to f32 after every operator loses more than what rounds at the border only.
    let wide = if kinds.iter().any(|kind| matches!(kind, RunnerKind::Ort | RunnerKind::Cpu)) {
        100.0
    } else {
        110.0
    };
    let bar = |manifest: &Manifest| match (&manifest.quantization, &manifest.options) {
        (Some(known), _) if known.bits_per_weight >= 8.0 && known.scheme != "w8a8" => 30.0,
        (Some(_), _) => 10.0,
        (None, ExportOptions { gelu: Gelu::Exact, precision: Precision::Fp32, .. }) => wide,
        (None, ExportOptions { gelu: Gelu::Exact, precision: Precision::Fp16, .. }) => 40.0,
        (None, _) => 35.0,
    };
    sources
        .into_iter()
        .map(|source| source.manifest().map_or(wide, bar))
        .fold(f64::INFINITY, f64::min)
}

pub(crate) fn token_ids(
    args: &CheckArgs,
    test: &Model,
    reference: &Model,
    spec: &StepSpec,
) -> anyhow::Result<Vec<u32>> {
    let ids = if let Some(ids) = &args.ids {
        ids.clone()
    } else {
        let tokenizer = match reference.tokenizer()? {
            Some(tokenizer) => Some(tokenizer),
            None => test.tokenizer()?,
        };
        match (tokenizer, &args.prompt) {
            (Some(tokenizer), prompt) => {
                let added = AddedTokens::AsText;
                match prompt {
                    Some(file) => text_ids(file, &[reference, test], &tokenizer, added)?.concat(),
                    None => tokenizer.encode(TEXT, added)?,
                }
            }
            (None, Some(file)) => {
                bail!("--prompt {}: neither side has a tokenizer; give --ids", file.display())
            }
            (None, None) => {
                spread_ids(Spread::Check, args.steps.min(spec.context), spec.vocab_size)?
            }
        }
    };
    if ids.is_empty() {
        bail!("there are no tokens to run; give a longer --prompt or --ids");
    }
    if let Some(id) = ids.iter().find(|id| **id as usize >= spec.vocab_size) {
        bail!("id {id} is outside the vocabulary of {}", spec.vocab_size);
    }
    Ok(ids)
}

/// Token rows, or for a slice the hidden state that enters it.
pub(crate) fn feed(
    spec: &StepSpec,
    reference: &Model,
    test: &Model,
) -> anyhow::Result<Box<dyn Feed>> {
    if spec.first_layer == 0 {
        for source in [reference, test] {
            if let Some(embedding) = source.embedding()? {
                return Ok(Box::new(EmbeddingFeed { embedding }));
            }
        }
        bail!(
            "neither side has an embedding table; check against the checkpoint, or export with \
             --embedding"
        );
    }
    for source in [reference, test] {
        if let Model::Checkpoint(checkpoint) = source {
            let options = StepOptions {
                tokens: spec.tokens,
                layers: 0..spec.first_layer,
                logits: Logits::Hidden,
                ..StepOptions::decode(checkpoint.config(), spec.context)
            };
            let before = StepSpec::new(checkpoint.config(), &options)?;
            let options = RunnerOptions::default();
            let runner = source.runner(RunnerKind::Engine, Some(&before), false, &options)?;
            let embedding = source.embedding()?.context("a checkpoint has an embedding")?;
            let state = KvState::new(&before)?;
            return Ok(Box::new(SliceFeed { embedding, runner, spec: before, state }));
        }
    }
    bail!(
        "the slice begins at layer {}, and the layers before it are in the checkpoint; check \
         against that",
        spec.first_layer
    );
}

fn lookup(embedding: &dyn Embedding, ids: &[u32]) -> Result<Vec<f32>, RunnerError> {
    let mut rows = vec![0.0; ids.len() * embedding.hidden_size()];
    embedding.lookup(ids, &mut rows)?;
    Ok(rows)
}

struct EmbeddingFeed {
    embedding: Box<dyn Embedding>,
}

impl Feed for EmbeddingFeed {
    fn rows(&mut self, ids: &[u32]) -> Result<Vec<f32>, RunnerError> {
        lookup(self.embedding.as_ref(), ids)
    }

    fn restart(&mut self) {}
}

/// Runs the layers before a slice.
struct SliceFeed {
    embedding: Box<dyn Embedding>,
    runner: Box<dyn Runner>,
    spec: StepSpec,
    state: KvState,
}

impl Feed for SliceFeed {
    fn rows(&mut self, ids: &[u32]) -> Result<Vec<f32>, RunnerError> {
        let x = lookup(self.embedding.as_ref(), ids)?;
        let step = self.state.prepare(&self.spec, &x)?;
        let outputs = self.runner.step(&self.state.inputs(&self.spec, &step)?)?;
        self.state.commit(&self.spec, step, &outputs)?;
        let hidden = outputs.get(&self.spec, Role::Hidden);
        let values = hidden.map(|tensor| tensor.view().to_f32().map_err(StepError::from));
        Ok(values.transpose()?.map(|values| values.into_owned()).unwrap_or_default())
    }

    fn restart(&mut self) {
        self.state.clear();
    }
}

/// The agreement of distributions in one line.
pub(super) fn logits_line(logits: &LogitsReport) -> String {
    format!(
        "top-1 {} ({} of {} tokens are ties), top-5 {:.1} %, KL {:.2e} mean {:.2e} max, top-20 \
         log-probability difference {:.2e}",
        logits.top1.map_or("-".into(), |share| format!("{:.1} %", 100.0 * share)),
        logits.ties,
        logits.tokens,
        100.0 * logits.top5,
        logits.kl_mean,
        logits.kl_max,
        logits.top20_logprob_max,
    )
}

fn print_report(
    report: &CheckReport,
    spec: &StepSpec,
    printer: &mut Printer,
) -> anyhow::Result<()> {
    printer.line(format!(
        "{} against {}: {} tokens in steps of {}{}",
        report.test,
        report.reference,
        report.tokens,
        report.tokens_per_step,
        match spec.sliding_window {
            Some(window) if report.tokens > window => format!(", past the window of {window}"),
            Some(window) => format!(", NOT past the window of {window}"),
            None => String::new(),
        }
    ))?;
    print_settings(&report.reference, &report.reference_settings, printer)?;
    print_settings(&report.test, &report.test_settings, printer)?;
    let first = if spec.logits == Logits::Hidden { "hidden" } else { "logits" };
    let mut rows = vec![["", "SNR", "max difference"].map(str::to_owned).to_vec()];
    let mut row = |name: String, snr: &Snr| {
        rows.push(vec![name, decibels(snr), format!("{:.3e}", snr.max_abs)]);
    };
    for layer in &report.layers {
        if let Some(hidden) = &layer.hidden {
            row(format!("after layer {} ({})", layer.layer, layer.kind), hidden);
        } else {
            row(format!("keys of layer {} ({})", layer.layer, layer.kind), &layer.keys);
            row(format!("values of layer {}", layer.layer), &layer.values);
        }
    }
    row("new keys and values".into(), &report.entries);
    row(first.into(), &report.output);
    if let Some(added) = &report.added {
        row("hidden, less what entered".into(), added);
    }
    for line in table(&rows) {
        printer.line(line)?;
    }
    if let Some(logits) = &report.logits {
        printer.line(logits_line(logits))?;
    }
    match &report.greedy {
        Some(greedy) => printer.line(format!(
            "greedy after {} tokens: {} of {} agree, {} ties left out{}",
            greedy.prompt_tokens,
            greedy.agreed,
            greedy.tokens.len() - greedy.ties,
            greedy.ties,
            greedy
                .first_difference
                .map_or(String::new(), |index| format!(", first difference at {index}")),
        ))?,
        None => printer.line("greedy: not run")?,
    }
    if let Some(bad) = &report.first_bad {
        printer.line(format!(
            "first below {} dB in a single step: {} at position {}, {}",
            report.min_snr,
            bad.name,
            bad.position,
            decibels(&bad.snr)
        ))?;
    }
    let verdict = if report.passed { "passed" } else { "FAILED" };
    printer.line(format!("{verdict}: the bar over all steps is {} dB", report.min_snr))?;
    Ok(())
}
