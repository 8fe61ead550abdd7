//! A checkpoint in the block formats of GGUF files, with searched scales.
//!
//! [`quantize_gguf`] writes a file: the scales of every block are those of least error, weighted by
//! the importance of the columns, and [`allocate`] gives larger formats to the matrices whose error
//! does most harm, as far as a budget of bits goes.

mod allocate;
mod blocks;

pub use allocate::{Effects, Raised, allocate, can_raise};

use crate::QuantizeError;
use blocks::{WRITTEN, can_quantize, quantize};
use firesteel_checkpoint::blocks::dequantize;
use firesteel_checkpoint::{
    Checkpoint, CheckpointError, EncodeRows, GgufEntry, GgufLayout, GgufRows, Head, Progress,
    SlotKind, Weight, WeightFormat, write_gguf,
};
use firesteel_tensor::DType;
use std::fmt;
use std::path::Path;

/// The importance of each column of a matrix by the name of the weight: the mean square of what
/// the column is multiplied with, or anything proportional to it.
pub type ColumnImportance<'a> = &'a (dyn Fn(&str) -> Option<Vec<f32>> + Sync);

/// The format of a matrix by the name of the weight; `None` for that of the options.
pub type Formats<'a> = &'a (dyn Fn(&str) -> Option<WeightFormat> + Sync);

/// How [`quantize_gguf`] writes.
#[derive(Clone, Copy)]
pub struct GgufOptions<'a> {
    /// Format of the matrices: f32, f16, bf16, q8_0, q4_0, q4_k or q6_k. Norms are f32. The
    /// head-wise gate is as the matrices where they are numbers and f32 where they are blocks.
    pub format: WeightFormat,
    /// Format of the embedding and of a stored head; `None` for that of the matrices.
    pub head: Option<WeightFormat>,
    /// Formats of single matrices. Norms are not asked for, and the gate is.
    pub formats: Option<Formats<'a>>,
    /// Importance of the columns for quantizing; where there is none, all are equal.
    pub importance: Option<ColumnImportance<'a>>,
    /// Name of the model in the metadata.
    pub name: Option<&'a str>,
    /// Whether an existing GGUF file is replaced. Any other existing file is an error.
    pub replace: bool,
}

impl GgufOptions<'_> {
    /// Matrices, embedding and head in `format`, no importance, no name, nothing replaced.
    pub fn new(format: WeightFormat) -> Self {
        Self { format, head: None, formats: None, importance: None, name: None, replace: false }
    }
}

impl fmt::Debug for GgufOptions<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GgufOptions")
            .field("format", &self.format)
            .field("head", &self.head)
            .field("formats", &self.formats.is_some())
            .field("importance", &self.importance.is_some())
            .field("name", &self.name)
            .field("replace", &self.replace)
            .finish()
    }
}

/// What [`quantize_gguf`] wrote.
#[derive(Debug, Clone, PartialEq)]
pub struct GgufReport {
    /// The tensors in the order of the file.
    pub tensors: Vec<QuantizedTensor>,
    /// Bytes of the file.
    pub bytes: u64,
    /// What the checkpoint says and the file has no place for, as name and value.
    pub warnings: Vec<String>,
}

/// A tensor that was written.
#[derive(Debug, Clone, PartialEq)]
pub struct QuantizedTensor {
    /// Name of the weight.
    pub name: String,
    /// How it was written.
    pub format: WeightFormat,
    /// Its elements.
    pub elements: u64,
    /// Its bytes.
    pub bytes: u64,
    /// √(Σ(x − x̂)² / Σx²), unweighted; 0 when nothing was lost.
    pub relative_rms: f64,
    /// √(Σ w(x − x̂)² / Σ w x²), w being the importance of the column: the error of the product as
    /// a share of it, if the inputs of different columns have nothing to do with each other.
    /// `None` without importance or where the format is that of the weight or numbers.
    pub weighted_rms: Option<f64>,
}

/// Writes `checkpoint` as a GGUF file, as [`write_gguf`] does, in the formats of `options`. Equal inputs
/// give equal bytes on any number of threads.
///
/// # Errors
/// As [`write_gguf`], and when a weight cannot be written in its format: it has a value that is not
/// finite or too large, or its rows are not whole blocks.
pub fn quantize_gguf(
    checkpoint: &Checkpoint,
    options: GgufOptions<'_>,
    out_file: &Path,
    progress: Progress<'_>,
) -> Result<GgufReport, QuantizeError> {
    let tensors = planned(checkpoint, &options)?;
    let entries: Vec<GgufEntry> = tensors.iter().map(|tensor| tensor.entry.clone()).collect();
    let larger = |tensor: &Planned| {
        let Planned { entry, bytes, .. } = tensor;
        let own = options.formats.and_then(|of| of(entry.weight.name()));
        own == Some(entry.format)
            && entry.format.is_quantized()
            && options.format.byte_count(entry.weight.element_count()) < Some(*bytes)
    };
    let layout = GgufLayout {
        tensors: &entries,
        format: options.format,
        raised: tensors.iter().any(larger),
        name: options.name,
        replace: options.replace,
    };
    let written = write_gguf(checkpoint, layout, &Encoder(&tensors), out_file, progress)?;
    let mut sums = vec![SquareError::default(); tensors.len()];
    for (index, error) in written.told {
        sums[index].add(error);
    }
    let share = |lost: f64, all: f64| if lost > 0.0 { (lost / all).sqrt() } else { 0.0 };
    let tensors = tensors.into_iter().zip(sums).map(|(tensor, sum)| QuantizedTensor {
        name: tensor.entry.weight.name().to_owned(),
        format: tensor.entry.format,
        elements: tensor.entry.weight.element_count() as u64,
        bytes: tensor.bytes as u64,
        relative_rms: share(sum.lost, sum.all),
        weighted_rms: (!tensor.importance.is_empty())
            .then(|| share(sum.weighted_lost, sum.weighted_all)),
    });
    Ok(GgufReport { tensors: tensors.collect(), bytes: written.bytes, warnings: written.warnings })
}

/// The tensors of a file, by the index that they have in it.
struct Encoder<'a>(&'a [Planned]);

impl EncodeRows for Encoder<'_> {
    type Room = Buffers;
    type Told = SquareError;
    type Error = QuantizeError;

    fn encode(
        &self,
        rows: GgufRows,
        room: &mut Buffers,
        out: &mut [u8],
    ) -> Result<SquareError, QuantizeError> {
        match self.0.get(rows.tensor) {
            Some(tensor) => tensor.convert(rows.first, rows.count, room, out),
            None => Ok(SquareError::default()),
        }
    }
}

/// A tensor and how it will be written.
struct Planned {
    entry: GgufEntry,
    /// Bytes in the file.
    bytes: usize,
    /// One weight a column, 1 in the mean; empty when all are equal.
    importance: Vec<f32>,
    /// What the given importance is in the mean; 1 when none was given.
    mean_importance: f64,
}

impl Planned {
    fn new(
        weight: &Weight,
        format: WeightFormat,
        options: &GgufOptions<'_>,
    ) -> Result<Self, QuantizeError> {
        let refuse = |reason: String| CheckpointError::Format {
            tensor: weight.name().to_owned(),
            format,
            reason,
        };
        let float = WeightFormat::Float;
        let known = matches!(format, WeightFormat::Float(DType::F32 | DType::F16 | DType::BF16));
        if !known && !can_quantize(format) {
            return Err(refuse(format!("this format is not written; accepted: {WRITTEN}")).into());
        }
        let entry = GgufEntry { weight: weight.clone(), format };
        let (bytes, columns) = (entry.bytes()?, entry.columns());
        let (mut importance, mut mean_importance) = (Vec::new(), 1.0);
        if format != float(weight.dtype())
            && format.is_quantized()
            && let Some(given) = options.importance.and_then(|of| of(weight.name()))
        {
            (importance, mean_importance) = checked_importance(given, columns).map_err(refuse)?;
        }
        Ok(Self { entry, bytes, importance, mean_importance })
    }

    fn weight(&self) -> &Weight {
        &self.entry.weight
    }
}

/// Importance scaled to a mean of 1, and its mean before. No column counts for nothing, so that a column which the
/// calibration never saw keeps a meaning.
fn checked_importance(given: Vec<f32>, columns: usize) -> Result<(Vec<f32>, f64), String> {
    const LEAST: f64 = 1e-4;
    if given.len() != columns {
        let length = given.len();
        return Err(format!(
            "its importance has {length} entries; accepted: {columns}, its columns"
        ));
    }
    if let Some(wrong) = given.iter().find(|w| !w.is_finite() || **w < 0.0) {
        return Err(format!("its importance has an entry {wrong}; accepted: numbers from 0"));
    }
    let mean = given.iter().map(|w| f64::from(*w)).sum::<f64>() / columns as f64;
    if mean == 0.0 {
        return Ok((Vec::new(), 1.0));
    }
    Ok((given.iter().map(|w| (f64::from(*w) / mean).max(LEAST) as f32).collect(), mean))
}

/// All tensors in the order of the model.
fn planned(
    checkpoint: &Checkpoint,
    options: &GgufOptions<'_>,
) -> Result<Vec<Planned>, QuantizeError> {
    let plan = |weight: &Weight, format: WeightFormat| {
        let own = options.formats.filter(|_| weight.shape().len() > 1);
        let own = own.and_then(|of| of(weight.name()));
        Planned::new(weight, own.unwrap_or(format), options)
    };
    let all_values = WeightFormat::Float(DType::F32);
    let head = options.head.unwrap_or(options.format);
    let small = if options.format.is_quantized() { all_values } else { options.format };
    let mut planned = vec![plan(checkpoint.embedding(), head)?];
    for layer in checkpoint.layers() {
        for (spec, weight) in layer.iter() {
            let format = match spec.kind {
                SlotKind::Norm => all_values,
                SlotKind::Matrix => options.format,
                SlotKind::SmallMatrix => small,
            };
            planned.push(plan(weight, format)?);
        }
    }
    planned.push(plan(checkpoint.final_norm(), all_values)?);
    if let Head::Stored(weight) = checkpoint.head() {
        planned.push(plan(weight, head)?);
    }
    Ok(planned)
}

/// Room for converting.
#[derive(Default)]
struct Buffers {
    values: Vec<f32>,
    read_back: Vec<f32>,
    importance: Vec<f32>,
}

/// Σ(x − x̂)² and Σx², as they are and weighted by the importance of the columns.
#[derive(Debug, Clone, Copy, Default)]
struct SquareError {
    lost: f64,
    all: f64,
    weighted_lost: f64,
    weighted_all: f64,
}

impl Planned {
    /// Writes the bytes of `count` elements from `first` on, which are whole rows of the tensor, to
    /// `out`, which has room for exactly those.
    fn convert(
        &self,
        first: usize,
        count: usize,
        buffers: &mut Buffers,
        out: &mut [u8],
    ) -> Result<SquareError, QuantizeError> {
        let Self { entry: GgufEntry { weight, format }, importance, .. } = self;
        let Buffers { values, read_back, importance: weights } = buffers;
        let refuse = |reason: String| {
            let tensor = weight.name().to_owned();
            QuantizeError::from(CheckpointError::Format { tensor, format: *format, reason })
        };
        let bytes = |count: usize| format.byte_count(count).unwrap_or_default();
        values.resize(count, 0.0);
        read_back.resize(count, 0.0);
        let mut error = SquareError::default();
        let unchanged = weight.format() == *format;
        if let (true, Some(blocks)) = (unchanged, weight.blocks()) {
            // Blocks that are in this format already lose nothing.
            let start = bytes(first);
            let part = blocks.get(start..start + out.len());
            out.copy_from_slice(part.ok_or_else(|| refuse("its blocks are not there".into()))?);
        } else if let WeightFormat::Float(dtype) = *format {
            let report = weight.convert(first, dtype, out)?;
            if report.overflowed > 0 {
                let count = report.overflowed;
                return Err(refuse(format!(
                    "{count} values are too large for it; accepted: bf16, f32 or a block format"
                )));
            }
            if !unchanged && dtype != DType::F32 {
                weight.read_f32(first, values)?;
                let converted = firesteel_tensor::read_f32(dtype, out, read_back);
                converted.map_err(|source| CheckpointError::Convert {
                    tensor: weight.name().to_owned(),
                    source,
                })?;
                error.add_values(values, read_back, &[]);
            }
        } else {
            weight.read_f32(first, values)?;
            if let Some(index) = values.iter().position(|value| !value.is_finite()) {
                let (value, index) = (values[index], first + index);
                return Err(refuse(format!(
                    "element {index} is {value}; accepted: finite numbers"
                )));
            }
            weights.clear();
            match importance.as_slice() {
                [] => weights.resize(count, 1.0),
                columns => weights.extend(columns.iter().cycle().take(count)),
            }
            quantize(*format, values, weights, out);
            dequantize(*format, out, 0, read_back).map_err(|error| refuse(error.to_string()))?;
            error.add_values(values, read_back, weights);
        }
        Ok(error)
    }
}

impl SquareError {
    /// Adds elements with their weights; without weights all have the same.
    fn add_values(&mut self, values: &[f32], read_back: &[f32], weights: &[f32]) {
        let weights = weights.iter().copied().chain(std::iter::repeat(1.0));
        for ((value, back), weight) in values.iter().zip(read_back).zip(weights) {
            let lost = f64::from(value - back).powi(2);
            let all = f64::from(*value).powi(2);
            self.lost += lost;
            self.all += all;
            self.weighted_lost += f64::from(weight) * lost;
            self.weighted_all += f64::from(weight) * all;
        }
    }

    fn add(&mut self, other: Self) {
        self.lost += other.lost;
        self.all += other.all;
        self.weighted_lost += other.weighted_lost;
        self.weighted_all += other.weighted_all;
    }
}
