//! `check fidelity`: how much of what a model says survives.

use super::{Judged, Runners, Sides, Verdicts, announce, decibels, print_settings};
use crate::printer::{Printer, table};
use crate::source::{decoder, kv_format};
use crate::texts::{chat_template, has_chats, numbered, read_chats, read_text, text_ids};
use anyhow::{Context as _, bail};
use clap::{ArgGroup, Args};
use firesteel_artifact::Manifest;
use firesteel_check::{PromptOptions, PromptsReport, TextReport, compare_prompts, compare_text};
use firesteel_engine::KvFormat;
use firesteel_generate::{AddedTokens, MessageRole, Tokenizer};
use firesteel_model::{DecoderOptions, Model, RunnerKind};
use firesteel_step::{Logits, StepOptions, StepSpec, Wanted};
use serde::Serialize;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

/// Compare what two runners say of a text and of prompts.
///
/// Each side is run for itself, with its own embedding. Exit code 1 when something is beyond its
/// bar.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("corpus").args(["text", "prompts"]).multiple(true).required(true))]
pub(crate) struct CheckFidelity {
    #[command(flatten)]
    sides: Sides,
    #[command(flatten)]
    runners: Runners,
    /// Text file, or conversations where it ends in .jsonl: compare logits, KL,
    /// perplexity and most probable tokens over it
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// File of prompts, one a line, or of conversations where it ends in .jsonl: compare greedy
    /// continuations of --greedy tokens
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,
    /// Most tokens of --text [default: all]
    #[arg(long, value_name = "N", requires = "text")]
    tokens: Option<usize>,
    /// Most tokens of a sequence that --text is cut into, or each of its conversations [default:
    /// 512, or the context of an artifact where that is shorter]
    #[arg(long, value_name = "N", requires = "text")]
    sequence: Option<NonZeroUsize>,
    /// Logit gap below which another choice of --text or --prompts is a near tie
    #[arg(long, value_name = "GAP", default_value_t = 0.05)]
    near_tie: f64,
    /// What is checked stores keys and values in this format on the cpu runner: f32, f16 or q8
    /// [default: f16]
    #[arg(long, value_name = "FORMAT")]
    kv: Option<KvFormat>,
    /// What is right stores keys and values in this format on the cpu runner: f32, f16 or q8
    /// [default: f32]
    #[arg(long, value_name = "FORMAT")]
    against_kv: Option<KvFormat>,
    /// Tokens of a greedy continuation of --prompts [default: 32]
    #[arg(long, value_name = "N", requires = "prompts")]
    greedy: Option<usize>,
    /// Smallest SNR in dB of the logits over --text
    #[arg(long, value_name = "DB", requires = "text", allow_negative_numbers = true)]
    min_snr: Option<f64>,
    /// Largest mean KL divergence over --text, in nats
    #[arg(long, value_name = "NATS", requires = "text")]
    max_kl: Option<f64>,
    /// Largest change of the perplexity of --text, as a share: 0.005 is half a percent
    #[arg(long, value_name = "SHARE", requires = "text")]
    max_perplexity_change: Option<f64>,
    /// Smallest share of --prompts that are continued exactly, near ties left out: 1 is all
    #[arg(long, value_name = "SHARE", requires = "prompts")]
    min_exact: Option<f64>,
    /// Smallest mean share of a continuation of --prompts before it differs, near ties left out
    #[arg(long, value_name = "SHARE", requires = "prompts")]
    min_kept: Option<f64>,
}

/// What came out.
#[derive(Debug, Serialize)]
struct FidelityReport {
    reference: String,
    reference_settings: Vec<(String, String)>,
    /// Format of the reference's keys and values on the cpu runner; null on others, whose caches
    /// are those of the step.
    reference_kv: Option<&'static str>,
    test: String,
    test_settings: Vec<(String, String)>,
    test_kv: Option<&'static str>,
    text: Option<TextReport>,
    prompts: Option<PromptsReport>,
    /// The bars that were missed, as sentences.
    exceeded: Vec<String>,
    passed: bool,
}

/// Tokens of a sequence where nothing is said.
const SEQUENCE: NonZeroUsize = NonZeroUsize::new(512).unwrap();

/// Tokens of a step over known tokens.
const CHUNK: usize = 64;

impl CheckFidelity {
    pub(crate) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        let (test, reference) = self.sides.open(printer)?;
        let report = self.compare(&test, &reference, printer)?;
        let verdicts = match &test {
            Model::Compiled(step) => Some(Verdicts::new(step, self.verdict(&report))?),
            Model::Checkpoint(_) | Model::Artifact(_) => None,
        };
        let passed = report.passed;
        if self.sides.json {
            printer.json(&Judged { verdicts, report })?;
        } else {
            print(&report, printer)?;
            verdicts.iter().try_for_each(|verdicts| verdicts.print(printer))?;
        }
        Ok(ExitCode::from(u8::from(!passed)))
    }

    fn greedy(&self) -> usize {
        self.greedy.unwrap_or(32)
    }

    fn compare(
        &self,
        test: &Model,
        reference: &Model,
        printer: &mut Printer,
    ) -> anyhow::Result<FidelityReport> {
        self.check_options()?;
        let [test_kind, reference_kind] = self.runners.kinds([test, reference])?;
        let kinds = [reference_kind, test_kind];
        let formats = [
            kv_format("--against-kv", self.against_kv, reference_kind)?.unwrap_or(KvFormat::F32),
            kv_format("--kv", self.kv, test_kind)?.unwrap_or_default(),
        ];
        let tokenizer = match reference.tokenizer()? {
            Some(tokenizer) => tokenizer,
            None => test.tokenizer()?.context("neither side has a tokenizer for the text")?,
        };
        let mut texts = match &self.text {
            Some(file) => text_ids(file, &[reference, test], &tokenizer, AddedTokens::AsText)?,
            None => Vec::new(),
        };
        let mut rest = self.tokens.unwrap_or(usize::MAX);
        for ids in &mut texts {
            ids.truncate(rest);
            rest -= ids.len();
        }
        let prompts = match &self.prompts {
            Some(file) => prompts(file, [reference, test], &tokenizer)?,
            None => Vec::new(),
        };
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        let continued = if prompts.is_empty() { 0 } else { longest.saturating_add(self.greedy()) };
        let text = texts.iter().map(Vec::len).max().unwrap_or(0);
        let asked = self.sequence.unwrap_or(SEQUENCE).get().min(text);
        let context = asked.max(continued).max(CHUNK);
        let manifest = [reference, test].into_iter().find_map(Model::manifest);
        // Of a prompt nobody wants more than the last logits.
        let prompt = if self.prompts.is_some() { CHUNK } else { 1 };
        for source in [test, reference] {
            source.verify()?;
        }
        let runner = self.runners.ort.options()?;
        let mut side = |source: &Model, kind, kv| {
            let options = DecoderOptions { kind, runner: &runner, prompt, all_logits: CHUNK, kv };
            decoder(source, &step(source, manifest, context)?, &options, printer)
        };
        let mut left = side(reference, kinds[0], formats[0])?;
        let mut right = side(test, kinds[1], formats[1])?;
        let sequence = self.fitting(asked, left.context().min(right.context()), printer)?;
        let sequences: Vec<&[u32]> =
            texts.iter().flat_map(|ids| ids.chunks(sequence.max(1))).collect();
        if kinds[1] == RunnerKind::Htp {
            let continued = prompts.iter().map(|ids| ids.len().saturating_add(self.greedy()));
            let all = sequences.iter().map(|ids| ids.len()).chain(continued);
            let steps = all.fold(0, usize::saturating_add);
            let limit = self.runners.ort.limits().time;
            let first = sequences.iter().copied().chain(prompts.iter().map(Vec::as_slice));
            if let Some(id) = first.flatten().next() {
                let started = Instant::now();
                right.forward(&[*id], Wanted::Last, &mut Vec::new())?;
                announce(started.elapsed(), steps, limit, "--tokens or --greedy", printer)?;
                right.clear();
            }
        }
        let kept_as = |kind, kv: KvFormat| (kind == RunnerKind::Cpu).then(|| kv.name());
        let mut report = FidelityReport {
            reference: left.name().into(),
            reference_settings: left.settings(),
            reference_kv: kept_as(kinds[0], formats[0]),
            test: right.name().into(),
            test_settings: right.settings(),
            test_kv: kept_as(kinds[1], formats[1]),
            text: None,
            prompts: None,
            exceeded: Vec::new(),
            passed: true,
        };
        if self.text.is_some() {
            let text = compare_text(left.as_mut(), right.as_mut(), &sequences, self.near_tie)?;
            self.judge_text(&text, &mut report.exceeded);
            report.text = Some(text);
        }
        if self.prompts.is_some() {
            let ends = reference.config()?.eos_token_ids;
            let options =
                PromptOptions { tokens: self.greedy(), tie_margin: self.near_tie, ends: &ends };
            let prompts = compare_prompts(left.as_mut(), right.as_mut(), &prompts, &options)?;
            self.judge_prompts(&prompts, &mut report.exceeded);
            report.prompts = Some(prompts);
        }
        report.passed = report.exceeded.is_empty();
        Ok(report)
    }

    /// The tokens of a sequence, of which `asked` are wanted and `context` fit.
    fn fitting(
        &self,
        asked: usize,
        context: usize,
        printer: &mut Printer,
    ) -> anyhow::Result<usize> {
        if asked <= context {
            return Ok(asked);
        }
        if let Some(asked) = self.sequence {
            bail!(
                "--sequence {asked}: the step has a context of {context}; up to that is accepted"
            );
        }
        printer.warn(&format!(
            "the text is cut into sequences of {context} tokens, the context of the step, not of \
             {SEQUENCE}: compare the figures with those of the same --sequence only"
        ));
        Ok(context)
    }

    /// Whether anything can be missed.
    fn has_bars(&self) -> bool {
        let bars =
            [self.min_snr, self.max_kl, self.max_perplexity_change, self.min_exact, self.min_kept];
        bars.iter().any(Option::is_some)
    }

    /// What a compiled step's report says of its numbers.
    fn verdict(&self, report: &FidelityReport) -> String {
        let mut figures = Vec::new();
        if let Some(text) = &report.text {
            figures.push(format!(
                "logits {} and top-1 {:.2} % over {} tokens",
                decibels(&text.logits),
                100.0 * text.top1,
                text.tokens
            ));
        }
        if let Some(prompts) = &report.prompts {
            let counted = prompts.prompts - prompts.ties;
            figures.push(format!("{} of {counted} prompts continued exactly", prompts.exact));
        }
        let answer = match (report.passed, self.has_bars()) {
            (false, _) => "NO",
            (true, true) => "yes",
            (true, false) => "no bar was given",
        };
        let figures = figures.join(", ");
        format!("{answer} on the emulator: {figures}, against {}", report.reference)
    }

    /// Refuses values that are out of their range, and options that would do nothing.
    fn check_options(&self) -> anyhow::Result<()> {
        let limits = [
            ("--max-kl", self.max_kl),
            ("--max-perplexity-change", self.max_perplexity_change),
            ("--near-tie", Some(self.near_tie)),
        ];
        for (option, value) in limits {
            if value.is_some_and(|value| !value.is_finite() || value < 0.0) {
                bail!("{option}: a finite number from 0 is accepted");
            }
        }
        for (option, share) in [("--min-exact", self.min_exact), ("--min-kept", self.min_kept)] {
            if let Some(share) = share.filter(|share| !(0.0..=1.0).contains(share)) {
                bail!("{option} {share}: a share from 0 to 1 is accepted");
            }
        }
        if self.min_snr.is_some_and(|bar| !bar.is_finite()) {
            bail!("--min-snr: a finite number is accepted");
        }
        if self.prompts.is_some() && self.greedy() == 0 {
            bail!("--greedy 0: --prompts compares continuations; 1 or more tokens are accepted");
        }
        Ok(())
    }

    fn judge_text(&self, text: &TextReport, exceeded: &mut Vec<String>) {
        let mut limit = |what: &str, value: f64, limit: Option<f64>| {
            // A value that is no number is beyond every limit.
            if let Some(limit) = limit
                && (value > limit || value.is_nan())
            {
                exceeded.push(format!("{what} is {value:.3e}, and the limit is {limit:e}"));
            }
        };
        limit("the mean KL divergence", text.kl_mean, self.max_kl);
        let change = text.perplexity_change.abs();
        limit("the change of the perplexity", change, self.max_perplexity_change);
        if let Some(bar) = self.min_snr.filter(|bar| !text.logits.reaches(*bar)) {
            exceeded.push(format!("the logits are at {}, below {bar} dB", decibels(&text.logits)));
        }
    }

    fn judge_prompts(&self, prompts: &PromptsReport, exceeded: &mut Vec<String>) {
        let bars = [
            ("the share of prompts continued exactly", prompts.exact_share, self.min_exact),
            ("the mean kept prefix", prompts.kept_prefix, self.min_kept),
        ];
        for (what, share, bar) in bars {
            let Some(bar) = bar else { continue };
            match share {
                Some(share) if share >= bar => {}
                Some(share) => exceeded.push(format!("{what} is {share:.4}, below {bar}")),
                None => exceeded.push(format!("{what} is not known: all prompts are near ties")),
            }
        }
    }
}

/// The step of a checkpoint, or that of the artifact on either side, in f32.
fn step(source: &Model, manifest: Option<&Manifest>, context: usize) -> anyhow::Result<StepSpec> {
    let spec = match manifest {
        Some(manifest) => manifest.contract()?,
        None => {
            let config = source.config()?;
            let context = context.min(config.max_position_embeddings);
            StepSpec::new(&config, &StepOptions::decode(&config, context))?
        }
    };
    let whole = spec.tokens == 1 && spec.first_layer == 0 && spec.logits != Logits::Hidden;
    if !whole {
        bail!("--text and --prompts need a whole model with its head, one token a step");
    }
    super::as_f32(&spec)
}

/// The ids of each prompt. An answer at the end of a conversation is left out: it is what the
/// models are to say.
fn prompts(
    file: &Path,
    sources: [&Model; 2],
    tokenizer: &Tokenizer,
) -> anyhow::Result<Vec<Vec<u32>>> {
    let mut prompts = Vec::new();
    if has_chats(file) {
        let template = chat_template(&sources)?;
        for (number, mut chat) in (1..).zip(read_chats(file)?) {
            if chat.messages.last().is_some_and(|last| last.role == MessageRole::Assistant) {
                chat.messages.pop();
            }
            chat.add_generation_prompt = true;
            let ids = template.encode(&chat, tokenizer);
            prompts.push(ids.with_context(|| numbered(number, file))?);
        }
    } else {
        let text = read_text(file)?;
        for line in text.lines().filter(|line| !line.trim().is_empty()) {
            prompts.push(tokenizer.encode(line, AddedTokens::Parse)?);
        }
    }
    if prompts.is_empty() {
        bail!("{} has no prompts; one a line is accepted", file.display());
    }
    Ok(prompts)
}

fn print(report: &FidelityReport, printer: &mut Printer) -> anyhow::Result<()> {
    let side = |runner: &str, kv: Option<&str>| match kv {
        Some(kv) => format!("{runner} with {kv} keys and values"),
        None => runner.to_owned(),
    };
    printer.line(format!(
        "{} against {}",
        side(&report.test, report.test_kv),
        side(&report.reference, report.reference_kv)
    ))?;
    print_settings(&report.reference, &report.reference_settings, printer)?;
    print_settings(&report.test, &report.test_settings, printer)?;
    if let Some(text) = &report.text {
        printer.line(format!(
            "text of {} tokens in {} sequences of up to {}",
            text.tokens, text.sequences, text.longest
        ))?;
        let percent = |share: f64| format!("{:.2} %", 100.0 * share);
        let rows = [
            ("logits", decibels(&text.logits)),
            ("KL mean", format!("{:.3e}", text.kl_mean)),
            ("KL p99", format!("{:.3e}", text.kl_p99)),
            ("KL max", format!("{:.3e}", text.kl_max)),
            ("perplexity of the reference", format!("{:.4}", text.reference_perplexity)),
            ("perplexity", format!("{:.4}", text.test_perplexity)),
            ("change of the perplexity", format!("{:+.3} %", 100.0 * text.perplexity_change)),
            ("top-1", percent(text.top1)),
            ("top-5", percent(text.top5)),
            ("top-1 disagreements", text.disagreements.to_string()),
            ("of them near ties", text.near_ties.to_string()),
        ];
        let rows = rows.map(|(name, value)| vec![name.to_owned(), value]);
        for line in table(&rows) {
            printer.line(line)?;
        }
    }
    if let Some(prompts) = &report.prompts {
        printer.line(format!(
            "{} of {} prompts continued exactly, {} near ties left out, mean kept prefix {}, {} \
             tokens",
            prompts.exact,
            prompts.prompts - prompts.ties,
            prompts.ties,
            prompts.kept_prefix.map_or("-".into(), |kept| format!("{:.1} %", 100.0 * kept)),
            prompts.tokens,
        ))?;
    }
    for limit in &report.exceeded {
        printer.line(format!("FAILED: {limit}"))?;
    }
    if report.passed {
        printer.line("passed")?;
    }
    Ok(())
}
