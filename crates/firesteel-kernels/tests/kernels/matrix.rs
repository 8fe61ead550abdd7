use firesteel_kernels::{Format, KernelError, MatrixView, pack, unpack};

use crate::support::{Weights, row_major};

const QUANTIZED: [Format; 4] = [Format::Q8, Format::Q4, Format::Q4K, Format::Q6K];

#[test]
fn unpacking_gives_the_packed_blocks_back() {
    for format in QUANTIZED {
        for rows in [0, 1, 7, 8, 9, 17] {
            for columns in [0, 1, 3].map(|blocks| blocks * format.block_columns()) {
                let blocks = row_major(format, rows, columns, 3);
                let weights = Weights::new(format, rows, columns, &blocks);
                let mut back = vec![0xAA; blocks.len()];
                unpack(weights.view(), &mut back).unwrap();
                assert_eq!(back, blocks, "{format} {rows} × {columns}");
            }
        }
    }
}

#[test]
fn packed_bytes_are_the_bytes_of_gguf() {
    let cases = [
        (Format::Q8, 34 * 64),
        (Format::Q4, 18 * 64),
        (Format::Q4K, 144 * 8),
        (Format::Q6K, 210 * 8),
    ];
    for (format, bytes) in cases {
        assert_eq!(format.packed_bytes(8, 256), Ok(bytes));
        assert_eq!(format.packed_bytes(5, 256), Ok(bytes));
        assert_eq!(format.row_major_bytes(8, 256), Ok(bytes));
    }
}

#[test]
fn rows_have_the_values_of_the_formats() {
    // Blocks made by hand from the definition of the formats, with scale 0.5.
    let half = 0x3800_u16.to_le_bytes();
    let mut q8 = half.to_vec();
    q8.extend((0..32).map(|i| (i * 8 - 128) as i8 as u8));
    let expected_q8: Vec<f32> = (0..32).map(|i| (i as f32 * 8.0 - 128.0) / 2.0).collect();

    let mut q4 = half.to_vec();
    q4.extend((0..16_u8).map(|i| i | (15 - i) << 4));
    let mut expected_q4: Vec<f32> = (0..16).map(|i| (i as f32 - 8.0) / 2.0).collect();
    expected_q4.extend((0..16).map(|i| (7.0 - i as f32) / 2.0));

    // d 0.5, dmin 0.5; scales 1 to 8 and minima 57 to 64 − 1 in six bits; value k % 16.
    let (scales, mins) = ([1_u8, 2, 3, 4, 33, 34, 35, 36], [57_u8, 58, 59, 60, 61, 62, 63, 0]);
    let mut q4k = [half, half].concat();
    let mut six = [0_u8; 12];
    for j in 0..4 {
        six[j] = scales[j] | (scales[j + 4] >> 4) << 6;
        six[j + 4] = mins[j] | (mins[j + 4] >> 4) << 6;
        six[j + 8] = (scales[j + 4] & 15) | (mins[j + 4] & 15) << 4;
    }
    q4k.extend(six);
    q4k.extend((0..128_u8).map(|i| (i % 16) | (i % 16) << 4));
    let expected_q4k: Vec<f32> = (0..256)
        .map(|k| f32::from(scales[k / 32]) * (k % 16) as f32 / 2.0 - f32::from(mins[k / 32]) / 2.0)
        .collect();

    // Value k % 64 of 64, scale index − 8.
    let mut q6k = [0_u8; 210];
    for k in 0..256 {
        let (value, half_block, j) = ((k % 64) as u8, k / 128, k % 128);
        q6k[half_block * 64 + j % 64] |= (value & 15) << (j / 64 * 4);
        q6k[128 + half_block * 32 + j % 32] |= (value >> 4) << (j / 32 * 2);
    }
    for i in 0..16 {
        q6k[192 + i] = (i as i8 - 8).cast_unsigned();
    }
    q6k[208..].copy_from_slice(&half);
    let expected_q6k: Vec<f32> = (0..256)
        .map(|k| (k as f32 / 16.0).floor() - 8.0)
        .zip(0..256)
        .map(|(s, k)| s * ((k % 64) as f32 - 32.0) / 2.0)
        .collect();

    let cases = [
        (Format::Q8, q8, expected_q8),
        (Format::Q4, q4, expected_q4),
        (Format::Q4K, q4k, expected_q4k),
        (Format::Q6K, q6k.to_vec(), expected_q6k),
    ];
    for (format, block, expected) in cases {
        let columns = format.block_columns();
        let blocks = [vec![0; block.len() * 9], block].concat();
        let weights = Weights::new(format, 10, columns, &blocks);
        let mut row = vec![0.0; columns];
        weights.view().row(9, &mut row).unwrap();
        assert_eq!(row, expected, "{format}");
        weights.view().row(0, &mut row).unwrap();
        assert!(row.iter().all(|v| *v == 0.0), "{format}");
    }
}

#[test]
fn float_rows_convert() {
    for format in [Format::F32, Format::F16, Format::BF16] {
        let weights = Weights::new(format, 2, 3, &row_major(format, 2, 3, 1));
        let (mut a, mut b) = ([0.0; 3], [0.0; 3]);
        weights.view().row(1, &mut a).unwrap();
        let bytes = row_major(format, 2, 3, 1);
        for (i, b) in b.iter_mut().enumerate() {
            let at = |bytes: usize| (3 + i) * bytes;
            *b = match format {
                Format::F32 => f32::from_le_bytes(bytes[at(4)..at(4) + 4].try_into().unwrap()),
                Format::F16 => {
                    half::f16::from_le_bytes(bytes[at(2)..at(2) + 2].try_into().unwrap()).to_f32()
                }
                _ => {
                    half::bf16::from_le_bytes(bytes[at(2)..at(2) + 2].try_into().unwrap()).to_f32()
                }
            };
        }
        assert_eq!(a, b, "{format}");
    }
}

#[test]
fn wrong_shapes_are_refused() {
    let storage = [0_u64; 64];
    let bytes: &[u8] = bytemuck::cast_slice(&storage);
    for format in QUANTIZED {
        let block = format.block_columns();
        assert_eq!(
            MatrixView::new(format, 8, block + 1, bytes).unwrap_err(),
            KernelError::Columns { format, block, columns: block + 1 }
        );
        assert!(matches!(
            MatrixView::new(format, usize::MAX, block, bytes).unwrap_err(),
            KernelError::TooLarge { .. }
        ));
        assert!(matches!(
            MatrixView::new(format, 8, block, &bytes[..1]).unwrap_err(),
            KernelError::Length { .. }
        ));
        let mut out = vec![0; 7];
        assert!(matches!(
            pack(format, &[], 8, block, &mut out).unwrap_err(),
            KernelError::Length { .. }
        ));
    }
    let odd = &bytes[1..];
    for (format, length) in
        [(Format::F32, 4), (Format::F16, 2), (Format::BF16, 2), (Format::Q4, 144)]
    {
        let columns = format.block_columns();
        assert_eq!(
            MatrixView::new(format, 1, columns, &odd[..length]).unwrap_err(),
            KernelError::Misaligned { format, alignment: format.alignment() }
        );
    }
    let floats = MatrixView::new(Format::F32, 1, 2, &bytes[..8]).unwrap();
    assert!(matches!(unpack(floats, &mut [0; 8]).unwrap_err(), KernelError::Format { .. }));
    assert_eq!(floats.row(1, &mut [0.0; 2]).unwrap_err(), KernelError::Row { row: 1, rows: 1 });
}
