use super::sequences;
use crate::QuantizeError;
use crate::gguf::{Formats, GgufOptions, GgufReport, Raised, allocate, can_raise, quantize_gguf};
use firesteel_checkpoint::{Checkpoint, Head, Progress, Slot, WeightFormat};
use firesteel_engine::Calibration;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

/// Bits for each weight that larger formats may fill.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum FileBits {
    /// None: every matrix has the format that is asked for.
    Fixed,
    /// What llama.cpp's Q4_K_M takes on the same model; which matrices get them is another matter.
    Mixed,
    /// So many.
    Bits(f64),
}

/// A GGUF file to be written.
pub struct FileRequest<'a> {
    /// The model.
    pub checkpoint: &'a Arc<Checkpoint>,
    /// Format of the matrices.
    pub format: WeightFormat,
    /// Format of the embedding and the head; `None` for that of the matrices.
    pub head: Option<WeightFormat>,
    /// Formats of single matrices, by name.
    pub formats: Formats<'a>,
    /// What larger formats may take.
    pub bits: FileBits,
    /// Texts that the model reads to learn which columns matter; none for all alike.
    pub texts: &'a [Vec<u32>],
    /// Most tokens of them; of more, some all over the texts are taken.
    pub tokens: usize,
    /// Whether an existing GGUF file is replaced.
    pub replace: bool,
}

/// What was written.
#[derive(Debug)]
pub struct QuantizedFile {
    /// The tensors.
    pub report: GgufReport,
    /// Tokens that were read; 0 without texts.
    pub calibration_tokens: usize,
    /// Matrices with a larger format than was asked for.
    pub raised: Vec<Raised>,
}

/// Writes a GGUF file: learns from the texts what columns matter, spends the bits, and writes.
/// `read` is told the tokens that were read and how many there are, `written` the bytes.
///
/// # Errors
/// When something of the request does nothing, the texts have no tokens, there are too few bits, or
/// as [`quantize_gguf`].
pub fn quantize_file(
    request: &FileRequest<'_>,
    out_file: &Path,
    read: &mut dyn FnMut(u64, u64),
    written: Progress<'_>,
) -> Result<QuantizedFile, QuantizeError> {
    let checkpoint = request.checkpoint;
    refuse_idle(request)?;
    let calibration = match request.texts {
        [] => None,
        texts => {
            let texts = sequences(texts, usize::MAX, checkpoint.config(), request.tokens);
            let total = texts.iter().map(|ids| ids.len() as u64).sum();
            let mut progress = |done: usize| read(done as u64, total);
            Some(Calibration::run(checkpoint, &texts, &mut progress)?)
        }
    };
    let importance = |name: &str| calibration.as_ref()?.importance(name);
    let options = GgufOptions {
        head: request.head,
        formats: Some(request.formats),
        importance: Some(&importance),
        replace: request.replace,
        ..GgufOptions::new(request.format)
    };
    let bits = match request.bits {
        FileBits::Fixed => None,
        FileBits::Mixed => Some(mixed_bits(checkpoint)),
        FileBits::Bits(bits) => Some(bits),
    };
    let raised = match bits {
        Some(bits) => {
            let effects = calibration.as_ref().map(|known| known.effects(checkpoint));
            let effect = |name: &str| effects.as_ref()?.get(name).copied();
            allocate(checkpoint, &options, bits, &effect)?
        }
        None => Vec::new(),
    };
    let larger: HashMap<&str, WeightFormat> =
        raised.iter().map(|raised| (&*raised.name, raised.to)).collect();
    let formats = |name: &str| larger.get(name).copied().or_else(|| (request.formats)(name));
    let options = GgufOptions { formats: Some(&formats), ..options };
    let report = quantize_gguf(checkpoint, options, out_file, written)?;
    let calibration_tokens = calibration.as_ref().map_or(0, Calibration::tokens);
    Ok(QuantizedFile { report, calibration_tokens, raised })
}

/// Refuses what would do nothing with these formats.
fn refuse_idle(request: &FileRequest<'_>) -> Result<(), QuantizeError> {
    let (main, head) = (request.format, request.head.unwrap_or(request.format));
    let outer = [request.checkpoint.embedding(), request.checkpoint.head_weight()];
    let layers = request.checkpoint.layers().iter().flat_map(|layer| layer.all());
    let matrices = outer.into_iter().chain(layers).filter(|weight| weight.shape().len() > 1);
    let by_name = matrices.filter_map(|weight| (request.formats)(weight.name()));
    let quantized = |format: WeightFormat| format.is_quantized();
    if !request.texts.is_empty() && ![main, head].into_iter().chain(by_name).any(quantized) {
        return Err(super::request(format!(
            "--calibrate does nothing with --format {main}, because numbers have no scale to \
             search; leave it out, or choose a format in blocks such as q8_0 or q4_k_m"
        )));
    }
    match request.bits {
        FileBits::Bits(bits) if !can_raise(main) && !can_raise(head) => {
            Err(super::request(format!(
                "--bits {bits} does nothing with --format {main}, because no larger format in \
                 blocks follows; leave it out, or choose a smaller format such as q4_k"
            )))
        }
        _ => Ok(()),
    }
}

/// Bits for each weight of the mixed format: no more than llama.cpp's Q4_K_M, which has the head and
/// every second of the value (with those fused to it) and down projections in q6_k.
fn mixed_bits(checkpoint: &Checkpoint) -> f64 {
    let bits =
        |format: WeightFormat| 8.0 * format.block_bytes() as f64 / format.block_elements() as f64;
    let (small, large) = (bits(WeightFormat::Q4K), bits(WeightFormat::Q6K));
    let head = checkpoint.head_weight();
    let mut all = checkpoint.final_norm().element_count() + checkpoint.embedding().element_count();
    if let Head::Stored(head) = checkpoint.head() {
        all += head.element_count();
    }
    let mut raised = head.element_count() as f64;
    for layer in checkpoint.layers() {
        for (spec, weight) in layer.iter() {
            all += weight.element_count();
            if matches!(spec.slot, Slot::QueryKeyValue | Slot::Value | Slot::MlpDown) {
                raised += weight.element_count() as f64 / 2.0;
            }
        }
    }
    small + (large - small) * raised / all.max(1) as f64
}
