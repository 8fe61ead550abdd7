use firesteel_kernels::{AttentionShape, Format, Isa, KernelError, Pool, measure};

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

#[test]
fn every_operation_can_be_timed_and_agrees_with_scalar() {
    let pool = Pool::new(2).unwrap();
    let attention = AttentionShape { heads: 4, kv_heads: 2, head_dim: 64, queries: 3 };
    let size = measure::Size { attention, entries: 300, rows: 3, columns: 64 };
    for operation in measure::Operation::ALL {
        for isa in Isa::available() {
            let result = measure::time_operation(&pool, (operation, isa), size, 2, 2).unwrap();
            assert!(result.difference < 1e-5, "{operation} {}: {result:?}", isa.name());
            let bytes = match operation {
                measure::Operation::AttentionF32 => 2 * 4 * 300 * 128 + 2 * 4 * 3 * 256,
                measure::Operation::AttentionF16 => 2 * 2 * 300 * 128 + 2 * 4 * 3 * 256,
                measure::Operation::AttentionQ8 => 2 * 300 * 128 / 32 * 34 + 2 * 4 * 3 * 256,
                measure::Operation::Quantize => 4 * 3 * 64 + 3 * 2 * 48,
                _ => 2 * 4 * 3 * 64,
            };
            assert_eq!(result.bytes, bytes, "{operation}");
        }
    }
    let odd = measure::Size { columns: 63, ..size };
    let quantize = (measure::Operation::Quantize, Isa::available()[0]);
    assert!(measure::time_operation(&pool, quantize, odd, 1, 1).is_err());
    let odd = AttentionShape { heads: 3, ..attention };
    let odd = measure::Size { attention: odd, ..size };
    let attend = (measure::Operation::AttentionF32, Isa::available()[0]);
    assert!(measure::time_operation(&pool, attend, odd, 1, 1).is_err());
}
