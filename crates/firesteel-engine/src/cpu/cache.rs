//! Keys and values of one layer of a sequence, by position.

use crate::EngineError;
use bytemuck::{cast_slice, cast_slice_mut};
use firesteel_checkpoint::ModelConfig;
use firesteel_kernels::{KvBlock, KvRows, Positions, Segment, quantize_kv};
use firesteel_step::StepError;
use firesteel_tensor::Buffer;
use half::f16;
use half::slice::HalfFloatSliceExt;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// Positions of a sliding layer that lie together. What is attended to is grouped by it, counted
/// from position 0, so a result does not depend on where a ring is or on how tokens are split into
/// forwards.
pub(super) const BLOCK: usize = 64;

/// How a [`CpuSequence`](super::CpuSequence) stores keys and values. What a token attends to is
/// rounded to it, its own entries included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum KvFormat {
    /// 4 bytes an element.
    F32,
    /// 2 bytes an element.
    #[default]
    F16,
    /// 34 bytes for 32 elements: an f16 scale and int8 values.
    Q8,
}

impl KvFormat {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::Q8];

    /// The lower-case name, as in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Q8 => "q8",
        }
    }

    /// Bytes of `elements` elements, which must be whole blocks.
    pub const fn bytes(self, elements: usize) -> usize {
        match self {
            Self::F32 => 4 * elements,
            Self::F16 => 2 * elements,
            Self::Q8 => elements / 32 * size_of::<KvBlock>(),
        }
    }

    /// Why heads of `config` cannot be stored, if they cannot.
    pub(super) fn check(self, config: &ModelConfig) -> Result<(), StepError> {
        if self == Self::Q8 && !config.head_dim.is_multiple_of(32) {
            return Err(StepError::Option {
                what: "key/value format",
                value: self.name().into(),
                accepted: format!(
                    "it needs a head_dim of whole blocks of 32, and it is {}; f16 \
                                   and f32 are accepted",
                    config.head_dim
                ),
            });
        }
        Ok(())
    }

    /// Writes a head as it is stored. `false` when a value does not fit.
    fn store(self, values: &[f32], out: &mut [u8]) -> Result<bool, EngineError> {
        Ok(match self {
            Self::F32 => {
                cast_slice_mut::<u8, f32>(out).copy_from_slice(values);
                values.iter().all(|value| value.is_finite())
            }
            Self::F16 => {
                let out = cast_slice_mut::<u8, f16>(out);
                out.convert_from_f32_slice(values);
                out.iter().all(|value| value.is_finite())
            }
            Self::Q8 => {
                let out = cast_slice_mut::<u8, KvBlock>(out);
                quantize_kv(values, out)?;
                // A NaN leaves no trace in the scale.
                out.iter().all(|block| block.scale.is_finite())
                    && values.iter().all(|value| value.is_finite())
            }
        })
    }

    /// Whole rows of a [`Buffer`], which aligns them, as the elements that they hold. Other bytes
    /// panic like an index outside of a slice, so that none ever stand for nothing.
    fn rows(self, bytes: &[u8]) -> KvRows<'_> {
        match self {
            Self::F32 => KvRows::F32(cast_slice(bytes)),
            Self::F16 => KvRows::F16(cast_slice(bytes)),
            Self::Q8 => KvRows::Q8(cast_slice(bytes)),
        }
    }
}

impl fmt::Display for KvFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for KvFormat {
    type Err = StepError;

    fn from_str(name: &str) -> Result<Self, StepError> {
        Self::ALL.into_iter().find(|format| format.name() == name).ok_or_else(|| {
            StepError::Option {
                what: "key/value format",
                value: name.into(),
                accepted: "f32, f16 and q8 are accepted".into(),
            }
        })
    }
}

/// What all layers of a sequence share.
#[derive(Debug, Clone, Copy)]
pub(super) struct Geometry {
    pub(super) format: KvFormat,
    pub(super) heads: usize,
    pub(super) head_dim: usize,
}

impl Geometry {
    pub(super) fn new(config: &ModelConfig, format: KvFormat) -> Self {
        Self { format, heads: config.num_key_value_heads, head_dim: config.head_dim }
    }

    /// Bytes of the keys, or the values, of one head at one position.
    fn row(self) -> usize {
        self.format.bytes(self.head_dim)
    }

    /// Bytes of the keys, or the values, of all heads at one position.
    pub(super) fn entry(self) -> usize {
        self.heads * self.row()
    }
}

/// Keys and values of one layer. Position p is in slot p mod `slots`; slots lie in blocks of
/// `[KV, block, head_dim]`, of which the last may be shorter if nothing ever comes round to slot 0.
#[derive(Debug)]
pub(super) struct LayerCache {
    geometry: Geometry,
    slots: usize,
    block: usize,
    keys: Buffer,
    values: Buffer,
}

impl LayerCache {
    /// Room for the whole context, in one block.
    pub(super) fn full(geometry: Geometry, context: usize) -> Self {
        Self::new(geometry, context, context)
    }

    /// A ring of whole blocks of [`BLOCK`], or fewer slots for a sequence that never fills them.
    pub(super) fn ring(geometry: Geometry, slots: usize) -> Self {
        Self::new(geometry, slots, BLOCK)
    }

    fn new(geometry: Geometry, slots: usize, block: usize) -> Self {
        // Zeroed memory costs nothing until it is written.
        let buffer = || Buffer::zeroed(slots * geometry.entry());
        Self { geometry, slots, block, keys: buffer(), values: buffer() }
    }

    /// Bytes of keys and values.
    pub(super) fn bytes(&self) -> usize {
        self.keys.len() + self.values.len()
    }

    /// The first slot of a block, how many it has, and where its bytes are.
    fn block(&self, slot: usize) -> (usize, usize, Range<usize>) {
        let first = slot / self.block * self.block;
        let capacity = self.block.min(self.slots - first);
        let start = first * self.geometry.entry();
        (first, capacity, start..start + capacity * self.geometry.entry())
    }

    /// Where the bytes of `head` at `position` are.
    fn place(&self, position: usize, head: usize) -> Range<usize> {
        let slot = position % self.slots;
        let (first, capacity, bytes) = self.block(slot);
        let row = self.geometry.row();
        let start = bytes.start + (head * capacity + slot - first) * row;
        start..start + row
    }

    /// Stores the keys and values of one position, `[KV, head_dim]` each. `false` when a value is
    /// not finite in the format.
    pub(super) fn store(
        &mut self,
        position: usize,
        keys: &[f32],
        values: &[f32],
    ) -> Result<bool, EngineError> {
        let Geometry { format, heads, head_dim } = self.geometry;
        let mut finite = true;
        for head in 0..heads {
            let (place, source) =
                (self.place(position, head), head * head_dim..(head + 1) * head_dim);
            finite &=
                format.store(&keys[source.clone()], &mut self.keys.bytes_mut()[place.clone()])?;
            finite &= format.store(&values[source], &mut self.values.bytes_mut()[place])?;
        }
        Ok(finite)
    }

    /// The entries of `positions`, one segment a block of them. They are in the cache.
    pub(super) fn segments(&self, positions: Range<usize>) -> Vec<Segment<'_>> {
        let Geometry { format, .. } = self.geometry;
        let start = positions.start / self.block * self.block;
        (start..positions.end)
            .step_by(self.block)
            .map(|first| {
                let (_, capacity, bytes) = self.block(first % self.slots);
                Segment {
                    keys: format.rows(&self.keys.bytes()[bytes.clone()]),
                    values: format.rows(&self.values.bytes()[bytes]),
                    entries: capacity.min(positions.end - first),
                    capacity,
                    positions: Positions::Consecutive(first),
                }
            })
            .collect()
    }

    /// The entries of `positions` as they are stored, keys and values, `[positions, KV, head_dim]`.
    pub(super) fn read(&self, positions: Range<usize>) -> [Buffer; 2] {
        let (row, entry) = (self.geometry.row(), self.geometry.entry());
        [&self.keys, &self.values].map(|stored| {
            let mut copy = Buffer::zeroed(positions.len() * entry);
            let targets = copy.bytes_mut().chunks_exact_mut(entry);
            for (position, target) in positions.clone().zip(targets) {
                for (head, target) in target.chunks_exact_mut(row).enumerate() {
                    target.copy_from_slice(&stored.bytes()[self.place(position, head)]);
                }
            }
            copy
        })
    }

    /// Writes what [`LayerCache::read`] gave to the positions from `first` on.
    pub(super) fn write(&mut self, first: usize, entries: &[Buffer; 2]) {
        let (row, entry) = (self.geometry.row(), self.geometry.entry());
        for (values, copy) in entries.iter().enumerate() {
            for (i, source) in copy.bytes().chunks_exact(entry).enumerate() {
                for (head, source) in source.chunks_exact(row).enumerate() {
                    let place = self.place(first + i, head);
                    let stored = if values == 0 { &mut self.keys } else { &mut self.values };
                    stored.bytes_mut()[place].copy_from_slice(source);
                }
            }
        }
    }
}
