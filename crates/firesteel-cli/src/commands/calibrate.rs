use super::check::{Spread, spread_ids};
use super::export::{GeluForm, layer_range};
use crate::printer::{Printer, table};
use crate::progress::Progress;
use crate::source;
use crate::texts::{chat_ids, text_hash, text_ids};
use anyhow::{Context as _, bail};
use clap::{Args, ValueEnum};
use firesteel_checkpoint::StagedFile;
use firesteel_generate::AddedTokens;
use firesteel_model::Model;
use firesteel_quantize::pipeline::{
    CalibrateRequest, Outlier, Overflow, Subject, calibrate, sequence_length,
};
use firesteel_quantize::{Method, Ranges};
use serde::Serialize;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Learn the ranges of a step's values from text.
///
/// The step's graph runs over the text on the evaluator, from empty caches to full ones and past
/// the sliding window. Before that the columns of a checkpoint's matrices are sized by way of the
/// norms for what they meet in a part of the text. `quantize graph` takes the file that is written.
#[derive(Debug, Args)]
pub(crate) struct Calibrate {
    /// Checkpoint, or an artifact in the qnn dialect
    checkpoint: PathBuf,
    /// Text files, or conversations where they end in .jsonl
    #[arg(long, value_name = "FILE", num_args = 1..)]
    text: Vec<PathBuf>,
    /// Files of conversations, one a line, which go through the chat template
    #[arg(long, value_name = "FILE.jsonl", num_args = 1..)]
    chat: Vec<PathBuf>,
    /// N ids all over the vocabulary instead of a text, for models without a tokenizer
    #[arg(long, value_name = "N", conflicts_with_all = ["text", "chat"])]
    spread: Option<usize>,
    /// Most sequences; of more, some all over the texts are taken
    #[arg(long, value_name = "N", default_value_t = 64)]
    samples: usize,
    /// Most tokens of a sequence [default: twice the sliding window, at least 256]
    #[arg(long, value_name = "T")]
    tokens: Option<usize>,
    /// Entries of a full-attention layer's cache [default: those of a sequence]
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// Layers: all, or 0:B, which must be all that will be quantized
    #[arg(long, value_name = "all|0:B", default_value = "all")]
    layers: String,
    /// Form of the GELU activation
    #[arg(long, value_enum, default_value_t = GeluForm::Exact)]
    gelu: GeluForm,
    /// Leave the columns of the matrices as they are and have them rounded to nearest, for
    /// comparisons
    #[arg(long)]
    plain: bool,
    /// How ranges are chosen
    #[arg(long, value_enum, default_value_t = Observer::Auto)]
    observer: Observer,
    /// File to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Replace an existing file of ranges
    #[arg(long)]
    force: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Observer {
    /// Half way from minmax to mse for 8 bits, minmax for 16
    Auto,
    /// The smallest and the largest value
    Minmax,
    /// Without one in 20,000 values on either side
    Percentile,
    /// The least squared error of rounding and saturation together
    Mse,
}

impl Observer {
    fn method(self) -> Method {
        match self {
            Self::Auto => Method::Auto,
            Self::Minmax => Method::MinMax,
            Self::Percentile => Method::Percentile,
            Self::Mse => Method::Mse,
        }
    }
}

/// Values that the text report lists.
const LISTED: usize = 8;

#[derive(Debug, Serialize)]
struct Report {
    path: String,
    tokens: u64,
    sequences: usize,
    /// Whether a sequence is longer than the sliding window.
    past_window: bool,
    tensors: usize,
    /// Values that half precision cannot hold, or that a norm squares and whose squares it cannot
    /// add where the norm is decomposed.
    overflow: Vec<Overflow>,
    /// Values with a channel far above the others, the farthest first.
    outliers: Vec<Outlier>,
}

impl Calibrate {
    pub(crate) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        let source = source::open(&self.checkpoint, printer)?;
        let config = source.config()?;
        let Some(embedding) = source.embedding()? else {
            bail!("the artifact has no embedding table; calibrate its checkpoint");
        };
        let subject = match &source {
            Model::Checkpoint(checkpoint) => Subject::Checkpoint(checkpoint),
            Model::Artifact(artifact) => {
                let given = [
                    ("--layers", self.layers != "all"),
                    ("--gelu", self.gelu.gelu() != artifact.manifest().options.gelu),
                    ("--context", self.context.is_some()),
                    ("--plain", self.plain),
                ];
                if let Some((option, _)) = given.iter().find(|(_, given)| *given) {
                    bail!("{option}: the step is that of the artifact; it goes with a checkpoint");
                }
                Subject::Artifact(artifact)
            }
            Model::Compiled(_) => bail!("it is compiled already; calibrate its checkpoint"),
        };
        let layers = layer_range(&self.layers, &config)?;
        if layers.start > 0 {
            bail!("--layers {}: a text enters at layer 0; 0:B is accepted", self.layers);
        }
        let length = sequence_length(subject, &config, self.tokens)?;
        let texts = self.texts(&source, length, config.vocab_size)?;
        let files = self.text.iter().chain(&self.chat);
        let request = CalibrateRequest {
            subject,
            config: &config,
            embedding: embedding.as_ref(),
            texts: &texts,
            hashes: files.map(|file| text_hash(file)).collect::<anyhow::Result<_>>()?,
            samples: self.samples,
            tokens: self.tokens,
            context: self.context,
            layers,
            gelu: self.gelu.gelu(),
            plain: self.plain,
            method: self.observer.method(),
        };
        let staged = self.stage()?;
        let bar = Progress::of_tokens("calibrating");
        let known =
            calibrate(&request, &mut |warning| printer.warn(warning), &mut |done, total| {
                bar.set(done, total)
            })?;
        drop(bar);
        staged.file().write_all(&known.ranges.to_json()?)?;
        staged.commit()?;
        let report = Report {
            path: self.out.display().to_string(),
            tokens: known.ranges.tokens,
            sequences: known.sequences,
            past_window: known.past_window,
            tensors: known.ranges.tensors.len(),
            overflow: known.overflow(),
            outliers: known.outliers(),
        };
        match self.json {
            true => printer.json(&report)?,
            false => print(&report, printer)?,
        }
        Ok(ExitCode::SUCCESS)
    }

    /// The file to write, refused at once where it cannot be.
    fn stage(&self) -> anyhow::Result<StagedFile> {
        let ranges = |path: &Path| Ok(Ranges::read(path).is_ok());
        let replace: Option<fn(&Path) -> std::io::Result<bool>> = self.force.then_some(ranges);
        StagedFile::create(&self.out, replace).with_context(|| {
            let hint = if self.force { "" } else { " (--force replaces ranges)" };
            format!("{} was not written{hint}", self.out.display())
        })
    }

    /// The ids that are run, in sequences of at most `length` tokens.
    fn texts(
        &self,
        source: &Model,
        length: usize,
        vocabulary: usize,
    ) -> anyhow::Result<Vec<Vec<u32>>> {
        if let Some(count) = self.spread {
            let limit = length.saturating_mul(self.samples);
            if count > limit {
                bail!(
                    "--spread {count}: {} sequences of {length} tokens are run; give more \
                     --samples or --tokens",
                    self.samples
                );
            }
            return Ok(vec![spread_ids(Spread::Calibration, count, vocabulary)?]);
        }
        if self.text.is_empty() && self.chat.is_empty() {
            bail!("there is nothing to read; give --text or --chat");
        }
        let tokenizer = source.tokenizer()?;
        let tokenizer = tokenizer.context("a text needs the model's tokenizer; see --spread")?;
        let mut texts = Vec::new();
        for file in &self.text {
            texts.extend(text_ids(file, &[source], &tokenizer, AddedTokens::Parse)?);
        }
        for file in &self.chat {
            texts.extend(chat_ids(file, &[source], &tokenizer)?);
        }
        Ok(texts)
    }
}

fn print(report: &Report, printer: &mut Printer) -> anyhow::Result<()> {
    printer.line(format!(
        "wrote {}: ranges of {} values over {} tokens in {} sequences",
        report.path, report.tensors, report.tokens, report.sequences
    ))?;
    if !report.overflow.is_empty() {
        let header = ["beyond half precision", "max |x|", "largest row square"];
        let mut rows = vec![header.map(str::to_owned).to_vec()];
        for entry in report.overflow.iter().take(LISTED) {
            let (magnitude, square) = (entry.magnitude, entry.row_square);
            rows.push(vec![entry.name.clone(), format!("{magnitude:.1}"), format!("{square:.3e}")]);
        }
        table(&rows).iter().try_for_each(|line| printer.line(line))?;
    }
    if !report.outliers.is_empty() {
        let header = ["outlier channels", "channel", "max |x|", "median channel"];
        let mut rows = vec![header.map(str::to_owned).to_vec()];
        for entry in report.outliers.iter().take(LISTED) {
            rows.push(vec![
                entry.name.clone(),
                entry.channel.to_string(),
                format!("{:.2}", entry.magnitude),
                format!("{:.2}", entry.median_channel),
            ]);
        }
        table(&rows).iter().try_for_each(|line| printer.line(line))?;
    }
    Ok(())
}
