use super::check::Spread;
use super::export::{GeluForm, layer_range};
use crate::printer::{Printer, table};
use crate::progress::Progress;
use crate::source::{self};
use crate::texts::{chat_ids, text_ids};
use anyhow::{Context as _, bail};
use clap::{Args, ValueEnum};
use firesteel_artifact::{checkpoint_hashes, sha256};
use firesteel_checkpoint::{Checkpoint, StagedFile};
use firesteel_export::{Dialect, ExportOptions, Precision, build};
use firesteel_generate::AddedTokens;
use firesteel_model::Model;
use firesteel_quantize::weights::{ColumnSizes, Importance, column_sizes, with_columns};
use firesteel_quantize::{Calibrator, Method, QuantizeError, Ranges, TensorRange, TextHash};
use firesteel_step::{CacheLayoutChoice, Logits, StepSpec};
use serde::Serialize;
use std::collections::BTreeSet;
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

/// Tokens of a step.
const CHUNK: usize = 64;

/// Least tokens of a sequence, unless said otherwise.
const SEQUENCE: usize = 256;

/// Largest number of half precision.
const HALF_LIMIT: f64 = 65504.0;

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

#[derive(Debug, Serialize)]
struct Overflow {
    name: String,
    magnitude: f64,
    row_square: f64,
}

#[derive(Debug, Serialize)]
struct Outlier {
    name: String,
    channel: u64,
    magnitude: f64,
    median_channel: f64,
}

impl Calibrate {
    pub(crate) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        let source = source::open(&self.checkpoint, printer)?;
        let config = source.config()?;
        let Some(embedding) = source.embedding()? else {
            bail!("the artifact has no embedding table; calibrate its checkpoint");
        };
        let twice = config.sliding_window.map_or(0, |window| window.saturating_mul(2));
        let wanted = self.tokens.unwrap_or(twice.max(SEQUENCE)).min(config.max_position_embeddings);
        if wanted == 0 || self.samples == 0 {
            bail!("--tokens and --samples: 1 or more is accepted");
        }
        let (length, chunk) = match &source {
            Model::Checkpoint(_) => (wanted, CHUNK.min(wanted)),
            Model::Artifact(artifact) => {
                let (spec, options) = (&artifact.manifest().step, &artifact.manifest().options);
                if options.dialect != Dialect::Qnn || artifact.manifest().graphs.len() > 1 {
                    bail!(
                        "the artifact is in the {} dialect with {} graphs; one in the qnn dialect \
                         with one graph is calibrated, or its checkpoint",
                        options.dialect,
                        artifact.manifest().graphs.len()
                    );
                }
                if artifact.manifest().quantization.is_some() || spec.first_layer > 0 {
                    bail!("the artifact is quantized or a later slice; calibrate its checkpoint");
                }
                let given = [
                    ("--layers", self.layers != "all"),
                    ("--gelu", self.gelu.gelu() != options.gelu),
                    ("--context", self.context.is_some()),
                    ("--plain", self.plain),
                ];
                if let Some((option, _)) = given.iter().find(|(_, given)| *given) {
                    bail!("{option}: the step is that of the artifact; it goes with a checkpoint");
                }
                let whole = wanted.min(spec.context) / spec.tokens * spec.tokens;
                (whole.max(spec.tokens), spec.tokens)
            }
            Model::Compiled(_) => bail!("it is compiled already; calibrate its checkpoint"),
        };
        let sequences = self.sequences(&source, length, config.vocab_size)?;
        let sequences: Vec<&[u32]> = sequences
            .iter()
            .map(|ids| match &source {
                Model::Checkpoint(_) => ids.as_slice(),
                Model::Artifact(_) | Model::Compiled(_) => &ids[..ids.len() / chunk * chunk],
            })
            .filter(|ids| !ids.is_empty())
            .collect();
        let longest = sequences.iter().map(|ids| ids.len()).max().unwrap_or(0);
        if longest == 0 {
            bail!("the texts have no tokens");
        }
        let past_window = config.sliding_window.is_none_or(|window| longest > window);
        if !past_window {
            printer.warn("no sequence is longer than the sliding window; give more --tokens");
        }
        let context = self.context.unwrap_or(longest);
        if context < longest {
            bail!("--context {context}: sequences have up to {longest} tokens");
        }
        let make = |model: Option<&Checkpoint>, tokens: usize| match &source {
            Model::Checkpoint(checkpoint) => {
                let layers = layer_range(&self.layers, checkpoint.config());
                let layers = layers.map_err(|error| option("--layers", &self.layers, &error))?;
                if layers.start > 0 {
                    let problem = "a text enters at layer 0; 0:B is accepted";
                    return Err(option("--layers", &self.layers, &problem));
                }
                let whole = layers.end == checkpoint.config().num_layers();
                let options = ExportOptions {
                    tokens,
                    context,
                    layers,
                    cache_layout: CacheLayoutChoice::default(),
                    logits: if whole { Logits::All } else { Logits::Hidden },
                    gelu: self.gelu.gelu(),
                    precision: Precision::Fp32,
                    dialect: Dialect::Qnn,
                    head_shards: 1,
                };
                let built = build(model.unwrap_or(checkpoint), &options)?;
                Ok((built.graph, built.spec))
            }
            Model::Artifact(artifact) => {
                let entry = artifact.manifest().graphs.first();
                let entry = entry.ok_or_else(|| option("ARTIFACT", "", &"names no graph"))?;
                let spec: StepSpec = artifact.step_spec(false);
                Ok((artifact.read_graph(entry)?, spec))
            }
            Model::Compiled(_) => Err(option("ARTIFACT", "", &"is compiled already")),
        };
        let gelu = match &source {
            Model::Artifact(artifact) => artifact.manifest().options.gelu,
            Model::Checkpoint(_) | Model::Compiled(_) => self.gelu.gelu(),
        };
        let staged = self.stage()?;
        // What quantize graph quantizes.
        let (mut columns, mut model) = (ColumnSizes::new(), None);
        if let (Model::Checkpoint(checkpoint), false) = (&source, self.plain) {
            let make = |tokens| make(None, tokens);
            let mut calibrator = Calibrator::new(&make, embedding.as_ref(), chunk);
            for ids in parts_of(&sequences) {
                calibrator.run(ids, &mut |_| ())?;
            }
            columns = column_sizes(checkpoint, &calibrator.importance())?;
            model = Some(with_columns(checkpoint, &columns)?);
        }
        let make = |tokens| make(model.as_ref(), tokens);
        let total = sequences.iter().map(|ids| ids.len() as u64).sum();
        let bar = Progress::of_tokens("calibrating");
        let mut calibrator = Calibrator::new(&make, embedding.as_ref(), chunk);
        for ids in &sequences {
            calibrator.run(ids, &mut |done| bar.set(done, total))?;
        }
        drop(bar);
        let method = self.observer.method();
        let tensors = calibrator.ranges(method)?;
        let checkpoint = match &source {
            Model::Checkpoint(checkpoint) => checkpoint_hashes(checkpoint),
            Model::Artifact(artifact) => artifact.manifest().model.checkpoint.clone(),
            Model::Compiled(_) => Vec::new(),
        };
        let texts = self.text.iter().chain(&self.chat);
        let texts = texts.map(|file| text_hash(file)).collect::<anyhow::Result<_>>()?;
        let ranges = Ranges {
            tool_version: env!("CARGO_PKG_VERSION").into(),
            checkpoint,
            columns,
            importance: if self.plain { Importance::new() } else { calibrator.importance() },
            texts,
            gelu,
            tokens: calibrator.tokens(),
            sequence: longest as u64,
            observer: method,
            tensors,
        };
        staged.file().write_all(&ranges.to_json()?)?;
        staged.commit()?;
        let report = Report {
            path: self.out.display().to_string(),
            tokens: ranges.tokens,
            sequences: sequences.len(),
            past_window,
            tensors: ranges.tensors.len(),
            overflow: overflow(&ranges, calibrator.squared()),
            outliers: outliers(&ranges),
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

    /// The sequences to run, each of at most `length` tokens.
    fn sequences(
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
            let ids = super::check::spread_ids(Spread::Calibration, count, vocabulary)?;
            return Ok(ids.chunks(length).map(<[u32]>::to_vec).collect());
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
        let all: Vec<&[u32]> = texts.iter().flat_map(|ids| ids.chunks(length)).collect();
        // Spread evenly, so that every text has its share.
        let (count, wanted) = (all.len(), self.samples.min(all.len()));
        let chosen = (0..wanted).map(|index| index * count / wanted.max(1));
        Ok(chosen.filter_map(|index| all.get(index).map(|ids| ids.to_vec())).collect())
    }
}

/// A few tokens of sequences all over the texts: enough to see how large channels are.
fn parts_of<'a>(sequences: &[&'a [u32]]) -> Vec<&'a [u32]> {
    let every = sequences.len().div_ceil(SIZED).max(1);
    let chosen = sequences.iter().step_by(every);
    chosen.map(|ids| ids.get(..SIZED_TOKENS).unwrap_or(ids)).collect()
}

/// Sequences, and tokens of each, from which the sizes of columns are learned.
const SIZED: usize = 8;
const SIZED_TOKENS: usize = 128;

fn option(option: &'static str, value: &str, problem: &dyn std::fmt::Display) -> QuantizeError {
    QuantizeError::Option { option, value: value.into(), problem: problem.to_string() }
}

fn text_hash(file: &Path) -> anyhow::Result<TextHash> {
    let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(TextHash { name, sha256: sha256(&fs_err::read(file)?) })
}

fn magnitude(range: &TensorRange) -> f64 {
    range.max.max(-range.min)
}

fn overflow(ranges: &Ranges, squared: &BTreeSet<String>) -> Vec<Overflow> {
    let beyond = ranges.tensors.iter().filter(|(name, range)| {
        let squares = squared.contains(*name) && range.largest_row_square > HALF_LIMIT;
        magnitude(range) > HALF_LIMIT || squares
    });
    let entry = |(name, range): (&String, &TensorRange)| Overflow {
        name: name.clone(),
        magnitude: magnitude(range),
        row_square: range.largest_row_square,
    };
    let mut list: Vec<Overflow> = beyond.map(entry).collect();
    list.sort_by(|a, b| b.row_square.total_cmp(&a.row_square));
    list
}

/// How far above the median a channel must be to be listed.
const OUTLIER: f64 = 10.0;

fn outliers(ranges: &Ranges) -> Vec<Outlier> {
    let entry = |(name, range): (&String, &TensorRange)| {
        let peak = range.channels.first()?;
        Some(Outlier {
            name: name.clone(),
            channel: peak.channel,
            magnitude: peak.magnitude,
            median_channel: range.median_channel,
        })
    };
    let mut list: Vec<Outlier> = ranges
        .tensors
        .iter()
        .filter_map(entry)
        .filter(|outlier| outlier.magnitude > OUTLIER * outlier.median_channel)
        .collect();
    let ratio = |outlier: &Outlier| outlier.magnitude / outlier.median_channel.max(1e-30);
    list.sort_by(|a, b| ratio(b).total_cmp(&ratio(a)));
    list
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
