//! `quantize gguf`: a checkpoint in the block formats of GGUF.

use super::texts_of;
use crate::printer::{Printer, mebibytes, table};
use crate::progress::Progress;
use crate::source;
use anyhow::bail;
use clap::{Args, ValueEnum};
use firesteel_checkpoint::{Checkpoint, WeightFormat};
use firesteel_model::Model;
use firesteel_quantize::gguf::{QuantizedTensor, Raised};
use firesteel_quantize::pipeline::{FileBits, FileRequest, QuantizedFile, quantize_file};
use firesteel_tensor::DType;
use glob::Pattern;
use serde::Serialize;
use std::path::PathBuf;
use std::process::ExitCode;

/// Write a GGUF file in the standard types and with the standard metadata.
///
/// The scale of every block is searched for the least error. Norms and small matrices such as a
/// head-wise gate stay floats. With --calibrate the columns count by what they meet in a text; with
/// --bits the matrices that do most harm get larger formats. The file appears complete or not at all.
#[derive(Debug, Args)]
pub(crate) struct QuantizeGguf {
    /// Checkpoint folder or GGUF file
    checkpoint: PathBuf,
    /// Format of the matrices
    #[arg(long, value_enum)]
    format: Format,
    /// Format of the embedding and the head [default: that of the matrices]
    #[arg(long, value_enum)]
    head: Option<Format>,
    /// Format of the matrices with a name like GLOB, such as '*.mlp.down_proj.*=q6_k'; may be
    /// repeated, and the last that fits counts
    #[arg(long, value_name = "GLOB=FORMAT", value_parser = tensor_format)]
    tensor: Vec<(Pattern, WeightFormat)>,
    /// Bits for each weight that larger formats may fill [default: none; for q4_k_m what the head and
    /// half of the value and down projections would take in q6_k]
    #[arg(long, value_name = "BITS")]
    bits: Option<f64>,
    /// Text files, or conversations where they end in .jsonl, that the model reads to learn which
    /// columns matter
    #[arg(long, value_name = "FILE", num_args = 1..)]
    calibrate: Vec<PathBuf>,
    /// Most tokens of the calibration; of more, some all over the texts are taken
    #[arg(long, value_name = "N", default_value_t = 8192, requires = "calibrate")]
    calibrate_tokens: usize,
    /// GGUF file to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Replace an existing GGUF file
    #[arg(long)]
    force: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Format {
    /// 8 bits, blocks of 32
    #[value(name = "q8_0", alias = "q8")]
    Q8,
    /// 4 bits, blocks of 32
    #[value(name = "q4_0", alias = "q4")]
    Q4,
    /// 4 bits with 6-bit scales, blocks of 256
    #[value(name = "q4_k")]
    Q4K,
    /// q4_k, and larger formats as far as --bits go
    #[value(name = "q4_k_m")]
    Q4KM,
    /// 6 bits, blocks of 256
    #[value(name = "q6_k")]
    Q6K,
    F16,
    Bf16,
    F32,
}

impl Format {
    fn weight_format(self) -> WeightFormat {
        match self {
            Self::Q8 => WeightFormat::Q8_0,
            Self::Q4 => WeightFormat::Q4_0,
            Self::Q4K | Self::Q4KM => WeightFormat::Q4K,
            Self::Q6K => WeightFormat::Q6K,
            Self::F16 => WeightFormat::Float(DType::F16),
            Self::Bf16 => WeightFormat::Float(DType::BF16),
            Self::F32 => WeightFormat::Float(DType::F32),
        }
    }
}

fn tensor_format(text: &str) -> Result<(Pattern, WeightFormat), String> {
    let accepted = "a name with * and ?, =, and a format are accepted, such as *.down_proj.*=q6_k";
    let (glob, format) = text.rsplit_once('=').ok_or(accepted)?;
    let pattern = Pattern::new(glob).map_err(|error| format!("{error}; {accepted}"))?;
    let format = Format::from_str(format, true).map_err(|error| format!("{error}; {accepted}"))?;
    Ok((pattern, format.weight_format()))
}

#[derive(Debug, Serialize)]
struct Report {
    path: String,
    bytes: u64,
    bits_per_weight: f64,
    /// 0 without calibration.
    calibration_tokens: usize,
    /// Matrices with a larger format than --format and --head say, because of --bits.
    raised: Vec<String>,
    tensors: Vec<Tensor>,
    /// What the model's folder says and the file does not.
    warnings: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Tensor {
    name: String,
    format: String,
    elements: u64,
    bytes: u64,
    /// √(Σ(x − x̂)² / Σx²).
    relative_rms: f64,
    /// The same with each column weighted by its importance; none without calibration.
    weighted_rms: Option<f64>,
}

impl From<QuantizedTensor> for Tensor {
    fn from(tensor: QuantizedTensor) -> Self {
        Self {
            name: tensor.name,
            format: tensor.format.to_string(),
            elements: tensor.elements,
            bytes: tensor.bytes,
            relative_rms: tensor.relative_rms,
            weighted_rms: tensor.weighted_rms,
        }
    }
}

impl QuantizeGguf {
    pub(crate) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        let source = source::open(&self.checkpoint, printer)?;
        let Model::Checkpoint(checkpoint) = &source else {
            bail!("{} is an artifact; quantize its checkpoint", self.checkpoint.display());
        };
        self.check_patterns(checkpoint)?;
        let texts = texts_of(&self.calibrate, &source, "--calibrate needs the model's tokenizer")?;
        let chosen = |name: &str| {
            let mut fitting = self.tensor.iter().rev().filter(|(glob, _)| glob.matches(name));
            fitting.next().map(|(_, format)| *format)
        };
        let bits = match self.bits {
            Some(bits) => FileBits::Bits(bits),
            None if self.format == Format::Q4KM => FileBits::Mixed,
            None => FileBits::Fixed,
        };
        let request = FileRequest {
            checkpoint,
            format: self.format.weight_format(),
            head: self.head.map(Format::weight_format),
            formats: &chosen,
            bits,
            texts: &texts,
            tokens: self.calibrate_tokens,
            replace: self.force,
        };
        let reading = Progress::of_tokens("calibrating");
        let writing = Progress::new("quantizing");
        let made = quantize_file(
            &request,
            &self.out,
            &mut |done, total| reading.set(done, total),
            &|done, total| writing.set(done, total),
        )?;
        drop((reading, writing));
        let QuantizedFile { report: written, calibration_tokens, raised } = made;
        let tensors: Vec<Tensor> = written.tensors.into_iter().map(Tensor::from).collect();
        let (bytes, elements) = tensors
            .iter()
            .fold((0u64, 0u64), |(b, e), tensor| (b + tensor.bytes, e + tensor.elements));
        let shown = |raised: &Raised| {
            let Raised { name, from, to, harm: [before, after], .. } = raised;
            format!("{name}: {from} to {to}, harm {before:.2e} to {after:.2e}")
        };
        let report = Report {
            path: self.out.display().to_string(),
            bytes: written.bytes,
            bits_per_weight: 8.0 * bytes as f64 / elements.max(1) as f64,
            calibration_tokens,
            raised: raised.iter().map(shown).collect(),
            tensors,
            warnings: written.warnings,
        };
        report.warnings.iter().for_each(|warning| printer.warn(warning));
        match self.json {
            true => printer.json(&report)?,
            false => print(report, printer)?,
        }
        Ok(ExitCode::SUCCESS)
    }

    /// Each --tensor is there for something.
    fn check_patterns(&self, checkpoint: &Checkpoint) -> anyhow::Result<()> {
        let mut names = vec![checkpoint.embedding().name(), checkpoint.head_weight().name()];
        for layer in checkpoint.layers() {
            let matrices = layer.all().iter().filter(|weight| weight.shape().len() > 1);
            names.extend(matrices.map(|weight| weight.name()));
        }
        for (glob, _) in &self.tensor {
            if !names.iter().any(|name| glob.matches(name)) {
                let some: Vec<&str> = names.iter().rev().take(6).copied().collect();
                bail!("--tensor {glob}: no matrix has such a name; some are {}", some.join(", "));
            }
        }
        Ok(())
    }
}

fn print(mut report: Report, printer: &mut Printer) -> anyhow::Result<()> {
    printer.line(format!(
        "wrote {}: {}, {:.2} bits a weight",
        report.path,
        mebibytes(report.bytes),
        report.bits_per_weight
    ))?;
    if report.calibration_tokens > 0 {
        printer.line(format!("calibrated with {} tokens", report.calibration_tokens))?;
    }
    for raised in &report.raised {
        printer.line(format!("raised {raised}"))?;
    }
    let weighted = |tensor: &Tensor| tensor.weighted_rms.unwrap_or(tensor.relative_rms);
    report.tensors.sort_by(|a, b| weighted(b).total_cmp(&weighted(a)));
    let columns = ["largest error first", "format", "relative rms", "weighted rms"];
    let columns = &columns[..if report.calibration_tokens > 0 { 4 } else { 3 }];
    let mut rows = vec![columns.iter().map(|&name| name.to_owned()).collect::<Vec<_>>()];
    for tensor in &report.tensors {
        let mut row = vec![
            tensor.name.clone(),
            tensor.format.clone(),
            format!("{:.4}", tensor.relative_rms),
            tensor.weighted_rms.map_or("-".into(), |rms| format!("{rms:.4}")),
        ];
        row.truncate(columns.len());
        rows.push(row);
    }
    for line in table(&rows) {
        printer.line(line)?;
    }
    Ok(())
}
