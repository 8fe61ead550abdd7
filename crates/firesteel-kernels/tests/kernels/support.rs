//! Inputs and references.

use firesteel_kernels::{Format, MatrixView, Pool, pack};
use firesteel_testing::Numbers;
use std::collections::BTreeMap;
use std::sync::Mutex;

/// The one pool of so many threads of a whole test, because making one takes longer than most cases do.
pub(crate) fn pool(threads: usize) -> &'static Pool {
    static POOLS: Mutex<BTreeMap<usize, &'static Pool>> = Mutex::new(BTreeMap::new());
    let make = || &*Box::leak(Box::new(Pool::new(threads).unwrap()));
    POOLS.lock().unwrap().entry(threads).or_insert_with(make)
}

/// GGUF blocks or floats, with weights of any bits and moderate scales.
pub(crate) fn row_major(format: Format, rows: usize, columns: usize, seed: u64) -> Vec<u8> {
    let mut random = Numbers::new(seed);
    let count = rows * columns;
    match format {
        Format::F32 => random.units(count).iter().flat_map(|v| v.to_le_bytes()).collect(),
        Format::F16 => {
            let values = random.units(count);
            values.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect()
        }
        Format::BF16 => {
            let values = random.units(count);
            values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect()
        }
        _ => {
            let length = format.row_major_bytes(rows, columns).unwrap();
            let mut bytes = random.bytes(length);
            for block in bytes.chunks_exact_mut(format.block_bytes()) {
                for at in scale_offsets(format) {
                    let scale = half::f16::from_f32(random.unit() * 0.01);
                    block[*at..at + 2].copy_from_slice(&scale.to_le_bytes());
                }
            }
            bytes
        }
    }
}

/// Where a GGUF block keeps its f16 numbers.
pub(crate) fn scale_offsets(format: Format) -> &'static [usize] {
    match format {
        Format::Q8 | Format::Q4 => &[0],
        Format::Q4K => &[0, 2],
        Format::Q6K => &[208],
        _ => &[],
    }
}

/// Weights in the layout of a view, in storage aligned to 8 bytes.
pub(crate) struct Weights {
    format: Format,
    rows: usize,
    columns: usize,
    storage: Vec<u64>,
}

impl Weights {
    pub(crate) fn new(format: Format, rows: usize, columns: usize, row_major: &[u8]) -> Self {
        let length = format.packed_bytes(rows, columns).unwrap();
        let mut storage = vec![0_u64; length.div_ceil(8)];
        let bytes = &mut bytemuck::cast_slice_mut(&mut storage)[..length];
        if format.is_quantized() {
            pack(format, row_major, rows, columns, bytes).unwrap();
        } else {
            bytes.copy_from_slice(row_major);
        }
        Self { format, rows, columns, storage }
    }

    pub(crate) fn view(&self) -> MatrixView<'_> {
        let length = self.format.packed_bytes(self.rows, self.columns).unwrap();
        let bytes = &bytemuck::cast_slice(&self.storage)[..length];
        MatrixView::new(self.format, self.rows, self.columns, bytes).unwrap()
    }
}

/// The largest difference, over the largest magnitude of the expected values (at least 1e-30).
pub(crate) fn difference(expected: &[f64], actual: &[f32]) -> f64 {
    assert_eq!(expected.len(), actual.len());
    let largest = expected.iter().fold(1e-30_f64, |a, b| a.max(b.abs()));
    expected.iter().zip(actual).fold(0.0_f64, |a, (e, v)| {
        let difference = (e - f64::from(*v)).abs();
        if difference.is_nan() { f64::INFINITY } else { a.max(difference) }
    }) / largest
}

pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}
