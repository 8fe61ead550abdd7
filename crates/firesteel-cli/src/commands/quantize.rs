use crate::printer::{Printer, mebibytes, table};
use crate::progress::ByteProgress;
use clap::{Args, ValueEnum};
use firesteel_checkpoint::{Checkpoint, GgufOptions, WeightFormat, write_gguf};
use firesteel_tensor::DType;
use serde::Serialize;
use std::path::PathBuf;
use std::process::ExitCode;

/// Write a checkpoint as a GGUF file, quantized or not.
///
/// The scale of every block is searched for the least error. Norms and the head-wise gate stay
/// floats. The file has the standard types and metadata, and appears complete or not at all.
#[derive(Debug, Args)]
pub(crate) struct Quantize {
    /// Checkpoint folder or GGUF file
    checkpoint: PathBuf,
    /// Format of the matrices
    #[arg(long, value_enum)]
    format: Format,
    /// Format of the embedding and the head [default: that of the matrices]
    #[arg(long, value_enum)]
    head: Option<Format>,
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
            Self::Q4K => WeightFormat::Q4K,
            Self::Q6K => WeightFormat::Q6K,
            Self::F16 => WeightFormat::Float(DType::F16),
            Self::Bf16 => WeightFormat::Float(DType::BF16),
            Self::F32 => WeightFormat::Float(DType::F32),
        }
    }
}

#[derive(Debug, Serialize)]
struct Report {
    path: String,
    bytes: u64,
    bits_per_weight: f64,
    tensors: Vec<Tensor>,
}

#[derive(Debug, Serialize)]
struct Tensor {
    name: String,
    format: String,
    elements: u64,
    bytes: u64,
    /// √(Σ(x − x̂)² / Σx²).
    relative_rms: f64,
}

/// Tensors with the largest error that the text report lists.
const WORST: usize = 8;

impl Quantize {
    pub(crate) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        let checkpoint = Checkpoint::open(&self.checkpoint)?;
        for warning in checkpoint.warnings() {
            printer.warn(warning);
        }
        let options = GgufOptions {
            head: self.head.map(Format::weight_format),
            replace: self.force,
            ..GgufOptions::new(self.format.weight_format())
        };
        let bar = ByteProgress::new("quantizing");
        let progress = |done, total| bar.set(done, total);
        let written = write_gguf(&checkpoint, options, &self.out, &progress)?;
        drop(bar);
        let tensors: Vec<Tensor> = written
            .tensors
            .into_iter()
            .map(|tensor| Tensor {
                name: tensor.name,
                format: tensor.format.to_string(),
                elements: tensor.elements,
                bytes: tensor.bytes,
                relative_rms: tensor.relative_rms,
            })
            .collect();
        let (bytes, elements) = tensors
            .iter()
            .fold((0u64, 0u64), |(b, e), tensor| (b + tensor.bytes, e + tensor.elements));
        let mut report = Report {
            path: self.out.display().to_string(),
            bytes: written.bytes,
            bits_per_weight: 8.0 * bytes as f64 / elements.max(1) as f64,
            tensors,
        };
        if self.json {
            printer.json(&report)?;
            return Ok(ExitCode::SUCCESS);
        }
        printer.line(format!(
            "wrote {}: {}, {:.2} bits a weight",
            report.path,
            mebibytes(report.bytes),
            report.bits_per_weight
        ))?;
        report.tensors.sort_by(|a, b| b.relative_rms.total_cmp(&a.relative_rms));
        let mut rows =
            vec![["largest errors", "format", "relative rms"].map(str::to_owned).to_vec()];
        for tensor in report.tensors.iter().take(WORST) {
            rows.push(vec![
                tensor.name.clone(),
                tensor.format.clone(),
                format!("{:.4}", tensor.relative_rms),
            ]);
        }
        for line in table(&rows) {
            printer.line(line)?;
        }
        Ok(ExitCode::SUCCESS)
    }
}
