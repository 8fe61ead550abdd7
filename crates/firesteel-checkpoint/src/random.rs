//! Weights made on demand.
//!
//! An element is a function of the seed, the name of its tensor and its index alone, so any part
//! of any tensor can be made by any thread. Elements come in groups of 1024: 256 words of the
//! SplitMix64 sequence, each split in four 16-bit parts, and the four sums of the parts with the
//! signs of a Hadamard matrix. Each sum is close to normal (Irwin–Hall of four), the four of a
//! word are uncorrelated, and they lie 256 elements apart.

use crate::ModelConfig;
use firesteel_tensor::{ConvertReport, DType, TensorError};
use half::f16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use std::sync::Arc;

/// How the weights of a synthetic checkpoint are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RandomWeights {
    /// Stored element type: f32, f16 or bf16.
    pub dtype: DType,
    /// Equal seeds make equal weights.
    pub seed: u64,
    /// Whether a handful of hidden channels are massive, as in trained models: they get large
    /// embeddings, are written with large weights and amplified by the norms.
    pub outliers: bool,
}

impl Default for RandomWeights {
    fn default() -> Self {
        Self { dtype: DType::BF16, seed: 0, outliers: false }
    }
}

/// What the elements of a tensor look like.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Distribution {
    /// Around 0 with a standard deviation of one over the square root of the columns, so that a
    /// matrix keeps the scale of what it is applied to.
    Matrix,
    /// Around 1.
    Norm,
}

/// Where the massive channels are in a tensor.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Amplified {
    /// Nowhere.
    Nothing,
    /// The columns of the channels: the embedding, and the norms of a layer.
    Columns(f32),
    /// The rows of the channels: the matrices that write to the residual stream.
    Rows(f32),
}

/// Makes the elements of one tensor.
#[derive(Debug)]
pub(crate) struct Generator {
    /// Starting point of the word sequence.
    base: u64,
    mean: f32,
    scale: f32,
    columns: usize,
    amplified: Amplified,
    channels: Arc<[usize]>,
    key: String,
}

const GROUP: usize = 1024;
const WORDS: usize = GROUP / 4;
/// Increment of the SplitMix64 sequence.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
/// Standard deviation of a sum of four centred 16-bit parts: 65536 × √(4/12).
const SUM_DEVIATION: f32 = 37837.2;
/// Standard deviation of a norm weight.
const NORM_DEVIATION: f32 = 0.05;

fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// The massive hidden channels of a seed, ascending; empty without outliers.
pub(crate) fn outlier_channels(config: &ModelConfig, options: RandomWeights) -> Arc<[usize]> {
    if !options.outliers {
        return Arc::new([]);
    }
    let count = (config.hidden_size / 16).clamp(1, 6);
    let width = config.hidden_size.max(1) as u64;
    let mut channels: Vec<usize> = Vec::new();
    let mut state = mix(options.seed ^ 0x6f75_746c_6965_7273);
    while channels.len() < count {
        state = state.wrapping_add(GOLDEN);
        let channel = (mix(state) % width) as usize;
        if !channels.contains(&channel) {
            channels.push(channel);
        }
    }
    channels.sort_unstable();
    channels.into()
}

impl Generator {
    /// A generator of the tensor `name` with rows of `columns`.
    pub(crate) fn new(
        name: &str,
        columns: usize,
        distribution: Distribution,
        amplified: Amplified,
        channels: &Arc<[usize]>,
        seed: u64,
    ) -> Self {
        // FNV-1a over the name.
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let (mean, deviation) = match distribution {
            Distribution::Matrix => (0.0, 1.0 / (columns.max(1) as f32).sqrt()),
            Distribution::Norm => (1.0, NORM_DEVIATION),
        };
        Self {
            base: mix(mix(seed) ^ hash),
            mean,
            scale: deviation / SUM_DEVIATION,
            columns: columns.max(1),
            amplified: if channels.is_empty() { Amplified::Nothing } else { amplified },
            channels: Arc::clone(channels),
            key: format!(
                "random:{seed}:{name}{}",
                if channels.is_empty() { "" } else { ":outliers" }
            ),
        }
    }

    /// Identity of the whole tensor.
    pub(crate) fn key(&self) -> &str {
        &self.key
    }

    /// The unrounded elements of one group.
    fn group(&self, index: usize, values: &mut [f32; GROUP]) {
        let mut words = [0u64; WORDS];
        let first = (index as u64).wrapping_mul(WORDS as u64);
        for (offset, word) in words.iter_mut().enumerate() {
            let counter = first.wrapping_add(offset as u64);
            *word = mix(self.base.wrapping_add(counter.wrapping_mul(GOLDEN)));
        }
        let (half, rest) = values.split_at_mut(2 * WORDS);
        let (sums, alternating) = half.split_at_mut(WORDS);
        let (halves, inner) = rest.split_at_mut(WORDS);
        let quarters = sums.iter_mut().zip(alternating).zip(halves.iter_mut().zip(inner));
        for (&word, ((sum, alternating), (half, inner))) in words.iter().zip(quarters) {
            let low = word as u32 as i32;
            let high = (word >> 32) as u32 as i32;
            let (a, b) = (i32::from(low as i16), low >> 16);
            let (c, d) = (i32::from(high as i16), high >> 16);
            let (ab, a_b) = (a + b, a - b);
            let (cd, c_d) = (c + d, c - d);
            // The parts are centred on −0.5, which only the plain sum does not cancel.
            *sum = self.mean + self.scale * (ab + cd + 2) as f32;
            *alternating = self.mean + self.scale * (a_b + c_d) as f32;
            *half = self.mean + self.scale * (ab - cd) as f32;
            *inner = self.mean + self.scale * (a_b - c_d) as f32;
        }
        self.amplify(index.saturating_mul(GROUP), values);
    }

    fn amplify(&self, start: usize, values: &mut [f32; GROUP]) {
        match self.amplified {
            Amplified::Nothing => {}
            Amplified::Columns(factor) => {
                let phase = start % self.columns;
                for &channel in self.channels.iter() {
                    let first = (channel + self.columns - phase) % self.columns;
                    values.iter_mut().skip(first).step_by(self.columns).for_each(|v| *v *= factor);
                }
            }
            Amplified::Rows(factor) => {
                for &channel in self.channels.iter() {
                    let row = channel.saturating_mul(self.columns);
                    let from = row.clamp(start, start + GROUP) - start;
                    let to = row.saturating_add(self.columns).clamp(start, start + GROUP) - start;
                    values[from..to].iter_mut().for_each(|v| *v *= factor);
                }
            }
        }
    }

    /// Calls `use_part` with the unrounded elements from `start` on in order, `count` in all, and
    /// how many came before.
    fn for_each_part<E>(
        &self,
        start: usize,
        count: usize,
        mut use_part: impl FnMut(usize, &[f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut values = [0f32; GROUP];
        let mut done = 0;
        while done < count {
            let position = start.saturating_add(done);
            self.group(position / GROUP, &mut values);
            let from = position % GROUP;
            let length = (GROUP - from).min(count - done);
            use_part(done, &values[from..from + length])?;
            done += length;
        }
        Ok(())
    }

    /// The elements from `start` on, rounded to `dtype` and widened.
    pub(crate) fn read_f32(
        &self,
        start: usize,
        dtype: DType,
        out: &mut [f32],
    ) -> Result<(), TensorError> {
        let mut halves = [0; GROUP];
        self.for_each_part(start, out.len(), |done, values| {
            let stored = round(values, dtype, &mut halves)?;
            firesteel_tensor::read_f32(dtype, stored, &mut out[done..done + values.len()])
        })
    }

    /// The elements from `start` on, rounded to `dtype` and then converted to `to`.
    pub(crate) fn convert(
        &self,
        start: usize,
        dtype: DType,
        to: DType,
        out: &mut [u8],
    ) -> Result<ConvertReport, TensorError> {
        let size = to.size();
        let count = out.len() / size;
        if !out.len().is_multiple_of(size) {
            let (expected, actual) = (count * size, out.len());
            return Err(TensorError::ByteLength {
                shape: vec![count],
                dtype: to,
                expected,
                actual,
            });
        }
        let mut report = ConvertReport::default();
        let mut halves = [0; GROUP];
        self.for_each_part(start, count, |done, values| {
            let out = &mut out[done * size..(done + values.len()) * size];
            let stored = round(values, dtype, &mut halves)?;
            if to == dtype {
                // Generated values are finite, so there is nothing to count.
                out.copy_from_slice(stored);
            } else {
                report.merge(firesteel_tensor::convert(dtype, stored, to, out)?);
            }
            Ok(())
        })?;
        Ok(report)
    }
}

/// The bytes of `values`, at most a group, rounded to `dtype`; `halves` is room for them.
fn round<'a>(
    values: &'a [f32],
    dtype: DType,
    halves: &'a mut [u16; GROUP],
) -> Result<&'a [u8], TensorError> {
    let halves = &mut halves[..values.len()];
    match dtype {
        DType::F32 => return Ok(bytemuck::cast_slice(values)),
        DType::F16 => halves.reinterpret_cast_mut::<f16>().convert_from_f32_slice(values),
        DType::BF16 => {
            for (half, &value) in halves.iter_mut().zip(values) {
                *half = round_bf16(value);
            }
        }
        to => return Err(TensorError::NoConversion { from: DType::F32, to }),
    }
    Ok(bytemuck::cast_slice(halves))
}

/// Rounds a finite value to nearest even; the generated values are all far from overflow.
fn round_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}
