use crate::{printer::Printer, progress::Progress};
use anyhow::bail;
use clap::{Args, ValueEnum};
use firesteel_checkpoint::{RandomWeights, SyntheticOptions, preset, presets, write_synthetic};
use firesteel_tensor::DType;
use std::path::PathBuf;
use std::process::ExitCode;

/// Write a checkpoint of a published shape with random weights.
///
/// Equal options write equal bytes, on any number of threads.
#[derive(Debug, Args)]
pub(crate) struct Synth {
    #[arg(long, value_name = "NAME", help = format!("Shape: {}", presets().join(", ")))]
    preset: String,
    /// Keep only the first N layers
    #[arg(long, value_name = "N")]
    layers: Option<usize>,
    /// Element type of the weights
    #[arg(long, value_enum, default_value_t = WeightType::Bf16)]
    dtype: WeightType,
    /// Give some channels massive activations, as trained models have
    #[arg(long)]
    outliers: bool,
    /// Start of the random numbers
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Folder to write; it must not exist
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

/// Element type of stored weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum WeightType {
    Bf16,
    F16,
    F32,
}

impl WeightType {
    pub(crate) fn dtype(self) -> DType {
        match self {
            Self::Bf16 => DType::BF16,
            Self::F16 => DType::F16,
            Self::F32 => DType::F32,
        }
    }
}

/// The preset of that name.
pub(crate) fn find_preset(name: &str) -> anyhow::Result<firesteel_checkpoint::ModelConfig> {
    match preset(name) {
        Some(config) => Ok(config),
        None => bail!("--preset {name} is not known; accepted: {}", presets().join(", ")),
    }
}

impl Synth {
    pub(crate) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        let mut config = find_preset(&self.preset)?;
        if let Some(layers) = self.layers {
            config = config.with_layers(layers)?;
        }
        let weights =
            RandomWeights { dtype: self.dtype.dtype(), seed: self.seed, outliers: self.outliers };
        let bar = Progress::new("writing");
        let progress = |done, total| bar.set(done, total);
        write_synthetic(SyntheticOptions { config, weights }, &self.out, &progress)?;
        drop(bar);
        printer.line(self.out.display().to_string())?;
        Ok(ExitCode::SUCCESS)
    }
}
