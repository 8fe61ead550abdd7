use firesteel_kernels::{Format, Isa, KernelError, Pool, measure};

#[test]
fn every_kernel_can_be_timed_and_agrees_with_scalar() {
    let pool = Pool::new(2).unwrap();
    let kernels = measure::kernels();
    assert_eq!(kernels.len(), Format::ALL.len() * Isa::available().len());
    let shape = measure::Shape { m: 3, k: 256, n: 20 };
    for entry in kernels {
        let result = measure::time(&pool, entry, shape, 2, 2).unwrap();
        assert!(result.difference < 1e-5, "{entry:?}: {result:?}");
        let weights = entry.format.packed_bytes(20, 256).unwrap();
        assert_eq!(result.bytes, weights + 4 * (3 * 256 + 3 * 20));
        let odd = measure::Shape { k: 255, ..shape };
        let refused =
            matches!(measure::time(&pool, entry, odd, 1, 1), Err(KernelError::Columns { .. }));
        assert_eq!(refused, entry.format.is_quantized());
    }
    assert!(measure::read_bandwidth(&pool, 1 << 20).unwrap() > 0.0);
    measure::read_bandwidth(&pool, 0).unwrap();
}
