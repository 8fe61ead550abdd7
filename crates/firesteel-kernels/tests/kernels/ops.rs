use firesteel_kernels::{Isa, ops};
use firesteel_testing::Numbers;

use crate::support::bits;

/// Every 2039th float, both signs, and the neighbourhood of the limits of approximations.
fn sweep() -> Vec<f32> {
    let mut all: Vec<f32> =
        (0..u32::MAX / 2039).map(|i| f32::from_bits(i * 2039)).filter(|v| v.is_finite()).collect();
    for centre in [0.0_f32, 1.0, 3.925, 3.925 * std::f32::consts::SQRT_2, 87.3, 88.7] {
        for step in -2000..2000 {
            all.push(f32::from_bits((centre.to_bits() as i32 + step).max(0) as u32));
            all.push(-f32::from_bits((centre.to_bits() as i32 + step).max(0) as u32));
        }
    }
    all.extend((-400_000..400_000).map(|i| i as f32 * 2e-5));
    all
}

#[test]
fn gelu_is_the_exact_form() {
    let x = sweep();
    let ones = vec![1.0; x.len()];
    for isa in Isa::available() {
        let mut out = x.clone();
        ops::gated_gelu(isa, &mut out, &ones).unwrap();
        for (x, v) in x.iter().zip(&out) {
            let x = f64::from(*x);
            let expected = 0.5 * x * (1.0 + libm::erf(x / std::f64::consts::SQRT_2));
            let error = (expected - f64::from(*v)).abs();
            assert!(error <= 5e-7 * x.abs().max(1.0), "{}: gelu({x}) = {v}", isa.name());
            // What the error of erf alone can be.
            let tiny = f64::from(f32::MIN_POSITIVE);
            assert!(error <= 6e-7 * x.abs() + tiny, "{}: gelu({x}) = {v}", isa.name());
        }
    }
}

#[test]
fn gelu_multiplies_and_passes_nan() {
    for isa in Isa::available() {
        let mut gate = vec![2.0, f32::NAN, -20.0, 20.0, f32::INFINITY];
        ops::gated_gelu(isa, &mut gate, &[3.0, 1.0, 5.0, 0.5, 1.0]).unwrap();
        assert!((gate[0] - 3.0 * 1.954_499_7).abs() < 3e-6, "{gate:?}");
        assert!(gate[1].is_nan());
        assert_eq!(gate[2..], [0.0, 10.0, f32::INFINITY]);
        assert!(ops::gated_gelu(isa, &mut gate, &[1.0]).is_err());
    }
}

#[test]
fn silu_follows_libm_and_multiplies() {
    let x = sweep();
    let ones = vec![1.0; x.len()];
    for isa in Isa::available() {
        let mut out = x.clone();
        ops::gated_silu(isa, &mut out, &ones).unwrap();
        for (x, v) in x.iter().zip(&out) {
            let x = f64::from(*x);
            let expected = x / (1.0 + (-x).exp());
            let error = (expected - f64::from(*v)).abs();
            // Below −88.7 the result is 0.
            assert!(error <= 4e-7 * expected.abs() + 1e-36, "{}: silu({x}) = {v}", isa.name());
        }
        let mut gate = vec![2.0, f32::NAN, -2e38, 20.0, f32::INFINITY];
        ops::gated_silu(isa, &mut gate, &[3.0, 1.0, 5.0, 0.5, 1.0]).unwrap();
        assert!((gate[0] - 3.0 * 1.761_594_2).abs() < 3e-6, "{gate:?}");
        assert!(gate[1].is_nan());
        assert_eq!(gate[2..], [0.0, 10.0, f32::INFINITY]);
        assert!(ops::gated_silu(isa, &mut gate, &[1.0]).is_err());
    }
}

#[test]
fn sigmoid_and_softmax_follow_libm() {
    let x = sweep();
    for isa in Isa::available() {
        let mut out = x.clone();
        ops::sigmoid(isa, &mut out);
        for (x, v) in x.iter().zip(&out) {
            let expected = 1.0 / (1.0 + (-f64::from(*x)).exp());
            assert!((expected - f64::from(*v)).abs() <= 2e-7, "{}: {x} {v}", isa.name());
        }
        // exp, through a row whose maximum is 0.
        for x in x.iter().filter(|x| **x <= 0.0 && **x > -87.0).step_by(37) {
            let mut row = [0.0, *x, f32::NEG_INFINITY];
            ops::softmax(isa, &mut row, 3).unwrap();
            let e = f64::from(*x).exp();
            let error = (e / (1.0 + e) - f64::from(row[1])).abs();
            assert!(error <= 4e-7 * e, "{}: exp({x})", isa.name());
            assert_eq!(row[2], 0.0);
        }
    }
}

#[test]
fn softmax_is_stable() {
    for isa in Isa::available() {
        for n in [1, 7, 8, 9, 31, 1000] {
            for offset in [0.0, 3e38, -3e38, 1e4] {
                let x: Vec<f32> =
                    Numbers::new(n as u64).units(n).iter().map(|v| v * 10.0 + offset).collect();
                let mut out = x.clone();
                ops::softmax(isa, &mut out, n).unwrap();
                let max = x.iter().fold(f32::NEG_INFINITY, |a, b| a.max(*b));
                let e: Vec<f64> = x.iter().map(|v| f64::from(v - max).exp()).collect();
                let sum: f64 = e.iter().sum();
                for (e, v) in e.iter().zip(&out) {
                    assert!((e / sum - f64::from(*v)).abs() < 3e-7, "{} {n} {offset}", isa.name());
                }
            }
        }
        let mut none = [f32::NEG_INFINITY; 9];
        ops::softmax(isa, &mut none, 9).unwrap();
        assert_eq!(none, [0.0; 9]);
        ops::softmax(isa, &mut [], 9).unwrap();
        assert!(ops::softmax(isa, &mut none, 4).is_err());
        assert!(ops::softmax(isa, &mut none, 0).is_err());
    }
}

#[test]
fn weights_are_exponentials() {
    let x: Vec<f32> = (0..=870_003).map(|step| -(step as f32) * 1e-4).collect();
    for isa in Isa::available() {
        for (largest, temperature) in [(0.0_f32, 1.0_f32), (2.5, 0.7)] {
            let mut weights = vec![f32::NAN; x.len()];
            let sum = ops::weigh(isa, &x, largest, temperature, &mut weights);
            let mut expected = 0.0;
            for (x, v) in x.iter().zip(&weights) {
                let exact = f64::from((x - largest) / temperature).exp();
                let error = (f64::from(*v) - exact).abs();
                assert!(error <= 3e-7 * exact + 2e-38, "{}: {x} {v} {exact}", isa.name());
                assert_eq!(*v, ops::weight(*x, largest, temperature), "{}: {x}", isa.name());
                expected += f64::from(*v);
            }
            assert!((sum / expected - 1.0).abs() < 1e-12, "{}: {sum} {expected}", isa.name());
        }
        let mut weights = [f32::NAN; 4];
        let sum = ops::weigh(isa, &[5.0, f32::NEG_INFINITY, -1e9], 5.0, 1e-9, &mut weights);
        assert_eq!((sum, &weights[..3]), (1.0, &[1.0, 0.0, 0.0][..]), "{}", isa.name());
        assert!(weights[3].is_nan(), "no logit, no weight");
    }
}

#[test]
fn every_instruction_set_gives_the_same_bytes() {
    let x = sweep();
    let run = |isa| {
        let (mut a, mut b) = (x.clone(), x[..100_000].to_vec());
        ops::gated_gelu(isa, &mut a, &x).unwrap();
        ops::softmax(isa, &mut b, 1000).unwrap();
        let mut e = x.clone();
        ops::gated_silu(isa, &mut e, &x).unwrap();
        let mut c = x.clone();
        ops::sigmoid(isa, &mut c);
        let mut d = x.clone();
        let sum = ops::weigh(isa, &x, 1e3, 0.8, &mut d);
        ([a, b, c, d, e].map(|v| bits(&v)), sum.to_bits())
    };
    let expected = run(Isa::available()[0]);
    for isa in Isa::available() {
        assert!(run(isa) == expected, "{}", isa.name());
    }
}

#[test]
fn rms_norm_follows_its_formula() {
    for n in [1, 7, 8, 9, 2048] {
        for size in [1.0_f32, 1e-20, 1e30] {
            let mut random = Numbers::new(4);
            let x: Vec<f32> = random.units(3 * n).iter().map(|v| v * size).collect();
            let w = random.units(n);
            let mut out = vec![0.0; 3 * n];
            ops::rms_norm(&x, &w, 1e-6, &mut out).unwrap();
            for (row, out) in x.chunks(n).zip(out.chunks(n)) {
                let mean = row.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / n as f64;
                for i in 0..n {
                    let expected =
                        f64::from(row[i]) * f64::from(w[i]) / (mean + f64::from(1e-6_f32)).sqrt();
                    let error = (expected - f64::from(out[i])).abs();
                    assert!(error <= 2.5e-7 * expected.abs(), "{n} {size} {i}");
                }
            }
        }
    }
    assert!(ops::rms_norm(&[1.0; 3], &[1.0; 2], 1e-6, &mut [0.0; 3]).is_err());
    assert!(ops::rms_norm(&[1.0; 2], &[1.0; 2], 1e-6, &mut [0.0; 3]).is_err());
    assert!(ops::rms_norm(&[1.0; 2], &[], 1e-6, &mut [0.0; 2]).is_err());
}

#[test]
fn rope_rotates_halves_and_leaves_the_rest() {
    let mut heads: Vec<f32> = (0..12).map(|v| v as f32).collect();
    ops::rope(&mut heads, 6, &[0.0, 0.6], &[1.0, 0.8]).unwrap();
    // (0, 2) by 90°, (1, 3) by the angle of 0.6 and 0.8; (6, 8) and (7, 9) likewise.
    let expected =
        [-2.0, 0.6 - 2.4, 0.0, 1.8 + 0.8, 4.0, 5.0, -8.0, 4.2 - 7.2, 6.0, 5.4 + 5.6, 10.0, 11.0];
    for (v, e) in heads.iter().zip(expected) {
        assert!((v - e).abs() < 1e-6, "{heads:?}");
    }
    assert!(ops::rope(&mut heads, 6, &[0.0; 4], &[0.0; 4]).is_err());
    assert!(ops::rope(&mut heads, 5, &[0.0; 1], &[0.0; 1]).is_err());
    assert!(ops::rope(&mut heads, 6, &[0.0; 1], &[0.0; 2]).is_err());
    assert!(ops::rope(&mut heads, 0, &[], &[]).is_err());
}

#[test]
fn add_and_scale() {
    let mut to = [1.0, 2.0];
    ops::add(&mut to, &[10.0, 20.0]).unwrap();
    ops::scale(&mut to, 0.5);
    assert_eq!(to, [5.5, 11.0]);
    assert!(ops::add(&mut to, &[1.0]).is_err());
}
