//! A kit for a device: which files it has and what its tensors are.
//!
//! The inputs of every step and graph are the reference's, so that one wrong output does not spoil the
//! next, and files are compared by name and step.

use anyhow::{Context as _, bail};
use firesteel_artifact::JsonFormat;
use firesteel_step::Encoding;
use firesteel_tensor::{DType, Tensor, TensorView, element_count};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Name of the description in a kit.
pub(crate) const KIT: &str = "kit.json";
/// How it is read.
const DOCUMENT: JsonFormat = JsonFormat {
    format: "firesteel-phone-kit",
    version: 1,
    limit: 16 << 20,
    what: "the description of a kit for a phone",
    again: "make the kit again",
};
/// Most steps of a kit.
pub(crate) const MAX_STEPS: usize = 10_000;

/// A kit's description.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Kit {
    format: String,
    format_version: u32,
    tool_version: String,
    /// The chip that the graphs were compiled for; `None` for ONNX files.
    pub(crate) soc: Option<String>,
    /// The runner whose outputs are the expected ones.
    pub(crate) reference: String,
    /// Token ids, those of each step one after the other.
    pub(crate) ids: Vec<u32>,
    /// Tokens of a step.
    pub(crate) tokens: usize,
    /// Number of steps.
    pub(crate) steps: usize,
    /// Rows of the head.
    pub(crate) vocab_size: usize,
    /// Whether logits are of every token of a step.
    pub(crate) all_logits: bool,
    /// SNR in dB that outputs are to reach.
    pub(crate) min_snr: f64,
    /// The graphs, in the order in which they run.
    pub(crate) parts: Vec<KitPart>,
}

/// One graph. Its inputs are in `NAME/inputs/step_N/TENSOR.raw`, in the element types of the graph,
/// its expected outputs in `NAME/expected/step_N/TENSOR.raw`, in f32.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct KitPart {
    /// Name, and folder of its tensors.
    pub(crate) name: String,
    /// ONNX file in `models`.
    pub(crate) model: String,
    /// Context binary in `models`.
    pub(crate) binary: Option<String>,
    /// First row of the vocabulary, for a part of the head.
    pub(crate) first_row: Option<usize>,
    /// What goes in.
    pub(crate) inputs: Vec<KitTensor>,
    /// What comes out.
    pub(crate) outputs: Vec<KitTensor>,
}

/// What an output is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Meaning {
    /// An input.
    Input,
    /// New keys or values.
    Entry,
    /// The residual stream.
    Hidden,
    /// Logits.
    Logits,
}

/// An input or output of a graph.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct KitTensor {
    /// Name in the graph.
    pub(crate) name: String,
    /// Element type in the graph.
    pub(crate) dtype: DType,
    /// Shape.
    pub(crate) shape: Vec<usize>,
    /// How the graph's integers mean numbers.
    pub(crate) encoding: Option<Encoding>,
    /// What it is.
    pub(crate) meaning: Meaning,
}

impl Kit {
    /// The description of `parts`, with everything else still to be said.
    pub(crate) fn new(parts: Vec<KitPart>) -> Self {
        Self {
            format: DOCUMENT.format.into(),
            format_version: DOCUMENT.version,
            tool_version: env!("CARGO_PKG_VERSION").into(),
            soc: None,
            reference: String::new(),
            ids: Vec::new(),
            tokens: 1,
            steps: 0,
            vocab_size: 0,
            all_logits: false,
            min_snr: 0.0,
            parts,
        }
    }

    /// Whether `folder` is a kit.
    pub(crate) fn is_in(folder: &Path) -> bool {
        folder.join(KIT).is_file()
    }

    /// Reads and checks the description of the kit in `folder`.
    pub(crate) fn read(folder: &Path) -> anyhow::Result<Self> {
        let file = folder.join(KIT);
        let name = || file.display().to_string();
        let kit: Self = DOCUMENT.read(&file)?;
        kit.validate().with_context(name)?;
        Ok(kit)
    }

    /// Refuses what cannot be a kit, whoever described it.
    pub(crate) fn validate(&self) -> anyhow::Result<()> {
        if self.steps == 0 || self.steps > MAX_STEPS || self.tokens == 0 {
            bail!(
                "{} steps of {} tokens; 1 to {MAX_STEPS} steps are accepted",
                self.steps,
                self.tokens
            );
        }
        if !self.min_snr.is_finite() {
            bail!("min_snr is {}; a finite number is accepted", self.min_snr);
        }
        for part in &self.parts {
            let names = part.inputs.iter().chain(&part.outputs).map(|tensor| &tensor.name);
            let files = [&part.name, &part.model].into_iter().chain(&part.binary);
            for name in files.chain(names) {
                // They are file names, items of an input list and words of a shell.
                let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
                if !name.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
                    || !name.chars().all(plain)
                {
                    bail!(
                        "{name:?} is no plain name; letters, digits, '_', '-' and '.' are accepted"
                    );
                }
            }
            for tensor in part.inputs.iter().chain(&part.outputs) {
                tensor.bytes(tensor.dtype)?;
                tensor.bytes(DType::F32)?;
                if let Some(encoding) = &tensor.encoding {
                    encoding.validate().with_context(|| tensor.name.clone())?;
                    if encoding.dtype != tensor.dtype {
                        bail!("{}: {} is encoded as {}", tensor.name, tensor.dtype, encoding.dtype);
                    }
                } else if !tensor.dtype.is_float() {
                    bail!("{}: {} has no encoding", tensor.name, tensor.dtype);
                }
            }
        }
        if self.parts.is_empty() {
            bail!("has no parts");
        }
        Ok(())
    }
}

impl KitTensor {
    /// Bytes of the tensor in elements of `dtype`.
    pub(crate) fn bytes(&self, dtype: DType) -> anyhow::Result<usize> {
        dtype.byte_count(&self.shape).filter(|bytes| *bytes > 0).with_context(|| {
            format!("{}: {:?} is no shape of a tensor of a graph", self.name, self.shape)
        })
    }

    /// `values` in the element type of the graph.
    pub(crate) fn encode(&self, values: &[f32]) -> anyhow::Result<Tensor> {
        let count = element_count(&self.shape);
        if count != Some(values.len()) {
            bail!("{}: {} values for {:?}", self.name, values.len(), self.shape);
        }
        let floats = Tensor::from_f32(self.shape.clone(), values.to_vec())?;
        Ok(match &self.encoding {
            Some(encoding) => encoding.quantize(floats.view())?,
            None => Tensor::from_f32_as(self.dtype, self.shape.clone(), values.to_vec())?,
        })
    }

    /// The numbers of a file in elements of the graph's type, or of f32.
    pub(crate) fn decode(&self, bytes: &[u8], form: Form) -> anyhow::Result<Vec<f32>> {
        let dtype = self.dtype_in(form);
        let expected = self.bytes(dtype)?;
        if bytes.len() != expected {
            bail!("has {} bytes; {:?} of {dtype} has {expected}", bytes.len(), self.shape);
        }
        let view = TensorView::new(dtype, &self.shape, bytes)?;
        Ok(match (&self.encoding, form) {
            (Some(encoding), Form::Native) => {
                encoding.dequantize(view)?.view().to_f32()?.into_owned()
            }
            _ => view.to_f32()?.into_owned(),
        })
    }

    /// The element type of a file.
    pub(crate) fn dtype_in(&self, form: Form) -> DType {
        match form {
            Form::Native => self.dtype,
            Form::Float => DType::F32,
        }
    }
}

/// The element type of a raw file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// That of the graph.
    Native,
    /// f32.
    Float,
}

/// Folder of a step's files.
pub(crate) fn step_folder(step: usize) -> String {
    format!("step_{step:03}")
}
