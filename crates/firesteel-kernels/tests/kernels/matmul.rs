use firesteel_kernels::{Format, Isa, KernelError, Product, QuantizedRows, matmul, matmul_group};
use firesteel_testing::Numbers;

use crate::support::{Weights, bits, difference, pool, row_major, scale_offsets};

/// The product in f64 of the dequantized weights with x.
fn reference(weights: &Weights, x: &[f32]) -> Vec<f64> {
    let (n, k) = (weights.view().rows(), weights.view().columns());
    let mut row = vec![0.0; k];
    let m = x.len().checked_div(k).unwrap_or(0);
    let mut out = vec![0.0; m * n];
    for i in 0..n {
        weights.view().row(i, &mut row).unwrap();
        for j in 0..m {
            let products = row.iter().zip(&x[j * k..]).map(|(w, x)| f64::from(*w) * f64::from(*x));
            out[j * n + i] = products.sum();
        }
    }
    out
}

/// What quantized activations stand for.
fn as_quantized(x: &[f32]) -> Vec<f32> {
    let mut out = Vec::new();
    for block in x.chunks(32) {
        let largest = block.iter().fold(0.0_f32, |a, b| a.max(b.abs()));
        let (scale, inverse) = (largest / 127.0, 127.0 / largest);
        out.extend(block.iter().map(|v| (v * inverse).round_ties_even() * scale));
    }
    out
}

fn run(isa: Isa, threads: usize, weights: &Weights, x: &[f32], m: usize) -> Vec<f32> {
    let pool = pool(threads);
    let mut out = vec![f32::NAN; m * weights.view().rows()];
    matmul(isa, pool, weights.view(), x, &mut out).unwrap();
    out
}

#[test]
fn products_are_right_for_all_sizes() {
    let mut failures = Vec::new();
    for format in Format::ALL {
        let block = format.block_columns();
        let columns = if format.is_quantized() {
            vec![block, 2 * block, 2048]
        } else {
            vec![1, 7, 8, 9, 15, 16, 17, 33, 511, 512, 513, 1029, 2048]
        };
        for n in [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 130] {
            for k in &columns {
                let weights = Weights::new(format, n, *k, &row_major(format, n, *k, 5));
                for m in [1, 2, 3, 4, 5, 7, 8, 9, 63, 64, 65] {
                    if n * k * m > 2_000_000 {
                        continue;
                    }
                    let x = Numbers::new(9).units(m * k);
                    let expected = if format.is_quantized() {
                        reference(&weights, &as_quantized(&x))
                    } else {
                        reference(&weights, &x)
                    };
                    for isa in Isa::available() {
                        let out = run(isa, 2, &weights, &x, m);
                        let difference = difference(&expected, &out);
                        if difference > 4e-6 {
                            failures.push((isa.name(), format, m, *k, n, difference));
                        }
                    }
                }
            }
        }
    }
    assert!(failures.is_empty(), "{failures:?}");
}

#[test]
fn long_rows_keep_their_precision() {
    for format in Format::ALL {
        let (n, k) = (9, 1 << 16);
        let weights = Weights::new(format, n, k, &row_major(format, n, k, 6));
        let x = Numbers::new(10).units(k);
        let stands_for = if format.is_quantized() { as_quantized(&x) } else { x.clone() };
        let expected = reference(&weights, &stands_for);
        for isa in Isa::available() {
            let difference = difference(&expected, &run(isa, 1, &weights, &x, 1));
            assert!(difference < 2e-5, "{} {format}: {difference}", isa.name());
        }
    }
}

#[test]
fn quantized_products_are_the_same_bytes_everywhere() {
    for format in [Format::Q8, Format::Q4, Format::Q4K, Format::Q6K] {
        let (n, k, m) = (43, 1024, 130);
        let weights = Weights::new(format, n, k, &row_major(format, n, k, 7));
        let x = Numbers::new(11).units(m * k);
        let expected = bits(&run(Isa::available()[0], 1, &weights, &x, m));
        for isa in Isa::available() {
            for threads in [1, 2, 3] {
                let out = bits(&run(isa, threads, &weights, &x, m));
                assert!(out == expected, "{} {format} {threads}", isa.name());
            }
        }
    }
}

#[test]
fn neither_threads_nor_other_rows_change_a_product() {
    for format in Format::ALL {
        let (n, k, m) = (37, 768, 131);
        let weights = Weights::new(format, n, k, &row_major(format, n, k, 8));
        let x = Numbers::new(12).units(m * k);
        for isa in Isa::available() {
            let all = bits(&run(isa, 1, &weights, &x, m));
            for threads in [2, 3] {
                assert!(bits(&run(isa, threads, &weights, &x, m)) == all, "{format} {threads}");
            }
            for j in [0, 1, 63, 64, 127, 128, 130] {
                let one = bits(&run(isa, 1, &weights, &x[j * k..(j + 1) * k], 1));
                assert!(one == all[j * n..(j + 1) * n], "{} {format} row {j}", isa.name());
            }
        }
    }
}

#[test]
fn extreme_weights_and_activations() {
    // Every byte 0x80, 0x00, 0xFF, 0x0F, 0xF0 (int8 −128, nibbles 0 and 15), scales from subnormal to
    // the largest, activations at both ends of int8.
    for format in [Format::Q8, Format::Q4, Format::Q4K, Format::Q6K] {
        for byte in [0x80_u8, 0x00, 0xFF, 0x7F, 0x0F, 0xF0] {
            for scale in [0x0001_u16, 0x8001, 0x03FF, 0x3C00, 0x7BFF, 0xFBFF] {
                let (n, k) = (9, 256);
                let mut blocks = vec![byte; format.row_major_bytes(n, k).unwrap()];
                for block in blocks.chunks_exact_mut(format.block_bytes()) {
                    for at in scale_offsets(format) {
                        block[*at..at + 2].copy_from_slice(&scale.to_le_bytes());
                    }
                }
                let weights = Weights::new(format, n, k, &blocks);
                for signs in [0_u32, u32::MAX, 0x5555_5555] {
                    for size in [1.0_f32, 1e-30, 1e25] {
                        let sign = |i: usize| if signs >> (i % 32) & 1 == 1 { -size } else { size };
                        let x: Vec<f32> = (0..2 * k).map(sign).collect();
                        let expected = reference(&weights, &x);
                        let scalar = bits(&run(Isa::available()[0], 1, &weights, &x, 2));
                        for isa in Isa::available() {
                            let out = run(isa, 1, &weights, &x, 2);
                            let context = format!(
                                "{} {format} {byte:#x} {scale:#x} {signs:#x} {size}",
                                isa.name()
                            );
                            assert!(bits(&out) == scalar, "{context}");
                            let limit = 4e-6 * 256.0 * 128.0 * f64::from(size);
                            let scale = f64::from(half::f16::from_bits(scale).to_f32()).abs();
                            for (e, v) in expected.iter().zip(&out) {
                                let error = (e - f64::from(*v)).abs();
                                assert!(error <= limit * scale * 64.0, "{context}: {e} {v}");
                            }
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn activations_that_are_not_finite_show() {
    let (n, k) = (8, 64);
    let weights = Weights::new(Format::Q4, n, k, &row_major(Format::Q4, n, k, 1));
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut x = Numbers::new(2).units(2 * k);
        x[k + 40] = bad;
        for isa in Isa::available() {
            let out = run(isa, 1, &weights, &x, 2);
            assert!(out[..n].iter().all(|v| v.is_finite()), "{}", isa.name());
            assert!(out[n..].iter().all(|v| v.is_nan()), "{}", isa.name());
        }
    }
    // Zeros and subnormals are zero, not NaN.
    for tiny in [0.0, 1e-40, f32::from_bits(1)] {
        let out = run(Isa::available()[0], 1, &weights, &vec![tiny; k], 1);
        assert!(out.iter().all(|v| *v == 0.0));
    }
}

#[test]
fn groups_give_what_single_products_give() {
    let (k, m) = (256, 5);
    let x = Numbers::new(3).units(m * k);
    let weights: Vec<Weights> =
        [(Format::Q4, 40), (Format::F32, 3), (Format::Q8, 9), (Format::BF16, 0)]
            .into_iter()
            .map(|(format, n)| Weights::new(format, n, k, &row_major(format, n, k, 4)))
            .collect();
    for isa in Isa::available() {
        let pool = pool(2);
        let mut quantized = QuantizedRows::new();
        quantized.quantize(isa, pool, &x, m, k).unwrap();
        let mut outs: Vec<Vec<f32>> =
            weights.iter().map(|w| vec![0.0; m * w.view().rows()]).collect();
        let mut products: Vec<Product<'_>> = weights
            .iter()
            .zip(&mut outs)
            .map(|(weights, out)| Product { weights: weights.view(), out })
            .collect();
        matmul_group(isa, pool, &x, &quantized, &mut products).unwrap();
        for (weights, out) in weights.iter().zip(&outs) {
            assert_eq!(bits(out), bits(&run(isa, 1, weights, &x, m)));
        }
    }
}

#[test]
fn wrong_lengths_are_refused() {
    let isa = Isa::detect().unwrap();
    let pool = pool(1);
    for format in [Format::F32, Format::Q4] {
        let weights = Weights::new(format, 8, 64, &row_major(format, 8, 64, 1));
        for (x, out) in [(63, 8), (64, 7), (64, 16), (0, 8)] {
            let error =
                matmul(isa, pool, weights.view(), &vec![0.0; x], &mut vec![0.0; out]).unwrap_err();
            assert!(matches!(error, KernelError::Length { .. }), "{format} {x} {out}");
        }
        matmul(isa, pool, weights.view(), &[], &mut []).unwrap();
    }
    let mut rows = QuantizedRows::new();
    assert!(rows.quantize(isa, pool, &[0.0; 33], 1, 33).is_err());
    assert!(rows.quantize(isa, pool, &[0.0; 33], 1, 32).is_err());
    assert!(rows.quantize(isa, pool, &[], usize::MAX, 64).is_err());
}
