//! `quantize graph`: a step's graph in integers.

use super::texts_of;
use crate::commands::check::{Spread, spread_ids};
use crate::commands::export::{StepArgs, threads};
use crate::printer::{Printer, mebibytes, table};
use crate::progress::Progress;
use crate::source;
use crate::texts::{text_hash, text_ids};
use anyhow::{Context as _, bail};
use clap::{Args, ValueEnum};
use firesteel_artifact::{Artifact, Write, sha256};
use firesteel_export::{Dialect, Precision};
use firesteel_generate::AddedTokens;
use firesteel_model::Model;
use firesteel_quantize::pipeline::{
    GraphReport, GraphRequest, GraphWrite, IntegerSource, Keep, QuantizedStep, Subject,
    ValueReport, quantize_step, refuse_seen,
};
use firesteel_quantize::weights::Budget;
use firesteel_quantize::{GraphKv, Ranges, Scheme, WeightWidth};
use glob::Pattern;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Write a step's graph in integers, as the Hexagon compiler takes it.
///
/// The output is an artifact in the qnn dialect whose operators stand between DequantizeLinear and
/// QuantizeLinear. The ranges of its values come from `firesteel calibrate`. It appears complete or
/// not at all.
#[derive(Debug, Args)]
pub(crate) struct QuantizeGraph {
    /// Checkpoint folder, GGUF file, or an artifact in floats
    checkpoint: PathBuf,
    /// Number formats of the step's graph: weights and activations
    #[arg(long, value_enum)]
    scheme: SchemeName,
    /// Bits for each weight that 8-bit matrices of --scheme mixed may fill
    #[arg(long, value_name = "BITS")]
    bits: Option<f64>,
    /// Ranges that `firesteel calibrate` wrote
    #[arg(long, value_name = "FILE")]
    ranges: Option<PathBuf>,
    /// Make the ranges up: for measuring time, the numbers are wrong
    #[arg(long, conflicts_with = "ranges")]
    uncalibrated: bool,
    /// Number format of keys and values [default: s16; u8 for w8a8]
    #[arg(long, value_enum)]
    kv: Option<Kv>,
    /// Another width for the matrices with a name like GLOB: fp16, w16, w8 or w4; may be repeated,
    /// and the last that fits counts
    #[arg(long, value_name = "GLOB=WIDTH", value_parser = kept)]
    keep: Vec<Keep>,
    /// Text files, or conversations where they end in .jsonl, that the model reads to round its
    /// weights for what they meet together [default: the scale of each row is searched for what
    /// --ranges say that its columns meet]
    #[arg(long, value_name = "FILE", num_args = 1..)]
    text: Vec<PathBuf>,
    /// N ids all over the vocabulary instead of --text, for models without a tokenizer
    #[arg(long, value_name = "N", conflicts_with_all = ["text", "text_tokens"])]
    spread: Option<usize>,
    /// Take the integers of a quantized artifact of the same model and ranges, such as another step
    #[arg(long, value_name = "ARTIFACT", requires = "ranges",
          conflicts_with_all = ["text", "spread", "quick", "bits", "budget_db"])]
    weights: Option<PathBuf>,
    /// Most tokens of --text; of more, some all over the texts are taken [default: 8192]
    #[arg(long, value_name = "N", requires = "text")]
    text_tokens: Option<usize>,
    /// Round each matrix by itself, and estimate the noise of each for mixed: for large models
    #[arg(long)]
    quick: bool,
    /// Signal to noise of the output in dB that --scheme mixed must reach with as few 8-bit matrices
    /// as possible, all else in floats
    #[arg(long, value_name = "DB", conflicts_with = "bits")]
    budget_db: Option<f64>,
    /// Text or conversations (.jsonl), as far as the context goes, on which every value is compared
    /// with the one in floats, and what is clipped is counted; not those of the calibration
    #[arg(long, value_name = "FILE")]
    check_text: Option<PathBuf>,
    /// Most tokens of --check-text [default: 128]
    #[arg(long, value_name = "N", requires = "check_text")]
    check_tokens: Option<usize>,
    /// Also write the embedding table as a raw file for hosts
    #[arg(long)]
    embedding: bool,
    #[command(flatten)]
    step: StepArgs,
    /// Folder of the artifact to write
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Replace an existing artifact
    #[arg(long)]
    force: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum SchemeName {
    /// 8-bit weights, 16-bit activations
    W8a16,
    /// 4-bit weights, 16-bit activations
    W4a16,
    /// 8-bit weights and activations
    W8a8,
    /// 16-bit weights and activations
    W16a16,
    /// 4-bit weights and 8-bit ones where they are worth it, 16-bit activations
    Mixed,
}

impl SchemeName {
    fn scheme(self) -> Scheme {
        match self {
            Self::W8a16 => Scheme::W8A16,
            Self::W4a16 => Scheme::W4A16,
            Self::W8a8 => Scheme::W8A8,
            Self::W16a16 => Scheme::W16A16,
            Self::Mixed => Scheme::Mixed,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kv {
    /// Signed 16-bit integers
    S16,
    /// Signed 8-bit integers
    S8,
    /// Unsigned 8-bit integers
    U8,
    /// Floats, half precision on the processor
    F16,
}

impl Kv {
    fn format(self) -> GraphKv {
        match self {
            Self::S16 => GraphKv::S16,
            Self::S8 => GraphKv::S8,
            Self::U8 => GraphKv::U8,
            Self::F16 => GraphKv::F16,
        }
    }
}

fn kept(text: &str) -> Result<Keep, String> {
    let accepted =
        "a name with * and ?, =, and fp16, w16, w8 or w4 are accepted, such as *lm_head*=w8";
    let (glob, width) = text.rsplit_once('=').ok_or(accepted)?;
    let pattern = Pattern::new(glob).map_err(|error| format!("{error}; {accepted}"))?;
    let width = match width {
        "fp16" => WeightWidth::Float,
        "w16" => WeightWidth::Sixteen,
        "w8" => WeightWidth::Eight,
        "w4" => WeightWidth::Four,
        _ => return Err(format!("{width:?} is no width; {accepted}")),
    };
    Ok(Keep { pattern, width })
}

/// Tokens of --text and --check-text, unless said otherwise.
const TEXT_TOKENS: usize = 8192;
const CHECK_TOKENS: usize = 128;

/// Values that the text report lists.
const WORST: usize = 8;

impl QuantizeGraph {
    pub(crate) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        let source = source::open(&self.checkpoint, printer)?;
        let subject = match &source {
            Model::Checkpoint(checkpoint) => Subject::Checkpoint(checkpoint),
            Model::Artifact(artifact) => Subject::Artifact(artifact),
            Model::Compiled(_) => bail!("it is compiled already; quantize its checkpoint"),
        };
        let scheme = self.scheme.scheme();
        let ranges = match (&self.ranges, self.uncalibrated) {
            (Some(file), _) => Some(Ranges::read(file)?),
            (None, true) => None,
            (None, false) => bail!(
                "--scheme {scheme} needs the ranges of the activations: give --ranges, which \
                 `firesteel calibrate` writes; --uncalibrated makes them up, for measuring time only"
            ),
        };
        if self.quick && self.text.is_empty() && self.spread.is_none() {
            bail!("--quick goes with --text or --spread");
        }
        if let Some(text) = &self.check_text {
            self.refuse_seen(text, ranges.as_ref())?;
        }
        let config = source.config()?;
        let export = match &source {
            Model::Checkpoint(checkpoint) => {
                let config = checkpoint.config();
                Some(self.step.options(config, Precision::Fp32, Dialect::Qnn, printer)?)
            }
            // What is given all the same is refused.
            _ if self.step != StepArgs::default() => {
                Some(self.step.options(&config, Precision::Fp32, Dialect::Qnn, printer)?)
            }
            _ => None,
        };
        let (texts, taken);
        let weights = if let Some(folder) = &self.weights {
            taken = Artifact::open(folder)?;
            IntegerSource::Artifact(&taken)
        } else if let Some(count) = self.spread {
            texts = vec![spread_ids(Spread::Calibration, count, config.vocab_size)?];
            IntegerSource::Texts { ids: &texts, tokens: usize::MAX, quick: self.quick }
        } else if !self.text.is_empty() {
            texts =
                texts_of(&self.text, &source, "--text needs the model's tokenizer; see --spread")?;
            let tokens = self.text_tokens.unwrap_or(TEXT_TOKENS);
            IntegerSource::Texts { ids: &texts, tokens, quick: self.quick }
        } else {
            if scheme.weights() == WeightWidth::Four
                && self.budget().is_none()
                && matches!(source, Model::Checkpoint(_))
            {
                printer.warn("--text makes better weights of 4 bits than a search of scales");
            }
            IntegerSource::Scales
        };
        let ranges_sha256 = match &self.ranges {
            Some(file) => Some(sha256(&fs_err::read(file)?)),
            None => None,
        };
        let request = GraphRequest {
            subject,
            export,
            scheme,
            kv: self.kv.map(Kv::format),
            keep: &self.keep,
            budget: self.budget(),
            ranges: ranges.as_ref(),
            ranges_sha256: ranges_sha256.as_deref(),
            weights,
        };
        let bar = Progress::new("rounding");
        let mut made = quantize_step(&request, &config, &mut |done| bar.set(done, done))?;
        drop(bar);
        made.warnings.iter().for_each(|warning| printer.warn(warning));
        if let Some(text) = &self.check_text {
            self.compare(text, &source, &mut made)?;
        }
        let artifact = self.write(&made)?;
        let report = &made.report;
        if !report.calibrated {
            printer.warn("uncalibrated: the numbers are wrong, only times mean something");
        }
        match self.json {
            true => printer.json(report)?,
            false => print(report, &artifact, printer)?,
        }
        Ok(ExitCode::SUCCESS)
    }

    fn budget(&self) -> Option<Budget> {
        self.bits.map(Budget::Bits).or(self.budget_db.map(Budget::Decibels))
    }

    /// Refuses a text that the ranges or the weights were learned from.
    fn refuse_seen(&self, text: &Path, ranges: Option<&Ranges>) -> anyhow::Result<()> {
        let read: Vec<_> =
            self.text.iter().map(|file| text_hash(file)).collect::<anyhow::Result<_>>()?;
        let known = ranges.iter().flat_map(|ranges| &ranges.texts).chain(&read);
        refuse_seen(&text_hash(text)?, known).context("--check-text")
    }

    /// Fills the report from a text.
    fn compare(
        &self,
        file: &Path,
        source: &Model,
        made: &mut QuantizedStep<'_>,
    ) -> anyhow::Result<()> {
        let tokenizer = source.tokenizer()?.context("--check-text needs the model's tokenizer")?;
        let texts = text_ids(file, &[source], &tokenizer, AddedTokens::AsText)?;
        let embedding = source.embedding()?.context(
            "--check-text needs the embedding table, which the artifact has not; quantize its \
             checkpoint",
        )?;
        made.compare(embedding.as_ref(), &texts, self.check_tokens.unwrap_or(CHECK_TOKENS))
            .with_context(|| format!("--check-text {}", file.display()))
    }

    fn write(&self, made: &QuantizedStep<'_>) -> anyhow::Result<Artifact> {
        let bar = Progress::new("writing");
        let how = Write { force: self.force, threads: threads() };
        let progress = |done, total| bar.set(done, total);
        let written =
            made.write(&self.out, GraphWrite { embedding: self.embedding, how }, &progress);
        written.map_err(|error| {
            let exists = !self.force && self.out.exists();
            let hint = if exists { " (--force replaces an artifact)" } else { "" };
            anyhow::Error::from(error)
                .context(format!("{} was not written{hint}", self.out.display()))
        })
    }
}

fn print(report: &GraphReport, artifact: &Artifact, printer: &mut Printer) -> anyhow::Result<()> {
    let bytes = artifact.manifest().data.iter().map(|data| data.bytes).sum();
    printer.line(format!(
        "wrote {}: {} with {} keys and values{}, {} of data, {:.2} bits a weight",
        artifact.folder().display(),
        report.scheme,
        report.kv,
        match (report.calibrated, report.calibration_texts.is_empty()) {
            (false, _) => ", UNCALIBRATED",
            (true, true) => ", calibrated on ids without a text",
            (true, false) => "",
        },
        mebibytes(bytes),
        report.bits_per_weight,
    ))?;
    let list = report.matrices.iter().map(|(dtype, count)| format!("{count} in {dtype}"));
    printer.line(format!("matrices: {}", list.collect::<Vec<_>>().join(", ")))?;
    if report.rounding_tokens > 0 {
        printer.line(format!("weights rounded for {} tokens", report.rounding_tokens))?;
    }
    for name in &report.raised {
        printer.line(format!("8 bits: {name}"))?;
    }
    let expected = report.predicted_db.map(|db| format!("{db:.1} dB expected"));
    let measured = report.measured_db.map(|db| format!("{db:.1} dB over texts set aside"));
    let known: Vec<String> = expected.into_iter().chain(measured).collect();
    if !known.is_empty() {
        let known = known.join(", ");
        printer.line(format!("output with these widths: {known}, all else in floats"))?;
    }
    if report.compared_tokens == 0 {
        return Ok(());
    }
    printer.line(format!("against floats over {} tokens", report.compared_tokens))?;
    let worst = report.values.iter().take(WORST);
    for (title, values) in
        [("layer", report.layers.iter().collect::<Vec<_>>()), ("worst values", worst.collect())]
    {
        let mut rows = vec![vec![title.to_owned(), "SNR".to_owned()]];
        rows.extend(
            values.into_iter().map(|value| {
                vec![value.name.clone(), crate::commands::check::decibels(&value.snr)]
            }),
        );
        table(&rows).iter().try_for_each(|line| printer.line(line))?;
    }
    let mut clipped: Vec<&ValueReport> =
        report.values.iter().filter(|value| value.clipped > 0.0).collect();
    if clipped.is_empty() {
        return Ok(());
    }
    clipped.sort_by(|a, b| b.beyond.total_cmp(&a.beyond));
    printer.line(format!(
        "{} of {} values are clipped somewhere; the farthest:",
        clipped.len(),
        report.values.len()
    ))?;
    let mut rows = vec![["value", "clipped", "beyond, of the range"].map(str::to_owned).to_vec()];
    rows.extend(clipped.iter().take(WORST).map(|value| {
        let percent = |share: f64| format!("{:.3} %", 100.0 * share);
        vec![value.name.clone(), percent(value.clipped), percent(value.beyond)]
    }));
    table(&rows).iter().try_for_each(|line| printer.line(line))?;
    Ok(())
}
