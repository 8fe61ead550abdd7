use firesteel_kernels::{AttentionShape, Format, Isa, KernelError, measure};

use crate::support::pool;

#[test]
fn every_kernel_can_be_timed_and_agrees_with_scalar() {
    let pool = pool(2);
    let kernels = measure::kernels();
    assert_eq!(kernels.len(), Format::ALL.len() * Isa::available().len());
    let shape = measure::Shape { m: 3, k: 256, n: 20 };
    for entry in kernels {
        let result = measure::time(pool, entry, shape, 2, 2).unwrap();
        assert!(result.difference < 1e-5, "{entry:?}: {result:?}");
        let weights = entry.format.packed_bytes(20, 256).unwrap();
        assert_eq!(result.bytes, weights + 4 * (3 * 256 + 3 * 20));
        let odd = measure::Shape { k: 255, ..shape };
        let refused =
            matches!(measure::time(pool, entry, odd, 1, 1), Err(KernelError::Columns { .. }));
        assert_eq!(refused, entry.format.is_quantized());
    }
    assert!(measure::read_bandwidth(pool, 1 << 20).unwrap() > 0.0);
    measure::read_bandwidth(pool, 0).unwrap();
}

#[test]
fn every_operation_can_be_timed_and_agrees_with_scalar() {
    let pool = pool(2);
    let attention = AttentionShape { heads: 4, kv_heads: 2, head_dim: 64, queries: 3 };
    let size = measure::OperandSize { attention, entries: 300, rows: 3, columns: 64 };
    for operation in measure::Operation::ALL {
        assert_eq!(operation.isas()[0].name(), "scalar", "{operation}");
        for isa in operation.isas() {
            let result = measure::time_operation(pool, (operation, isa), size, 2, 2).unwrap();
            assert!(result.difference < 1e-5, "{operation} {}: {result:?}", isa.name());
            let bytes = match operation {
                measure::Operation::AttentionF32 => 2 * 4 * 300 * 128 + 2 * 4 * 3 * 256,
                measure::Operation::AttentionF16 => 2 * 2 * 300 * 128 + 2 * 4 * 3 * 256,
                measure::Operation::AttentionQ8 => 2 * 300 * 128 / 32 * 34 + 2 * 4 * 3 * 256,
                measure::Operation::Quantize => 4 * 3 * 64 + 3 * 2 * 48,
                measure::Operation::QuantizeKv | measure::Operation::DequantizeKv => {
                    4 * 3 * 64 + 3 * 2 * 34
                }
                _ => 2 * 4 * 3 * 64,
            };
            assert_eq!(result.bytes, bytes, "{operation}");
        }
    }
    // 63 columns, and 63 elements a head.
    let uneven = AttentionShape { head_dim: 63, ..attention };
    let odd = measure::OperandSize { columns: 63, attention: uneven, ..size };
    for operation in measure::Operation::ALL {
        let timed = measure::time_operation(pool, (operation, Isa::available()[0]), odd, 1, 1);
        assert_eq!(timed.is_err(), operation.block_columns() > 1, "{operation}: {timed:?}");
    }
    assert!(attention.check().is_ok());
    let three = AttentionShape { heads: 3, ..attention };
    assert!(matches!(three.check(), Err(KernelError::AttentionShape { heads: 3, .. })));
    let odd = measure::OperandSize { attention: three, ..size };
    let attend = (measure::Operation::AttentionF32, Isa::available()[0]);
    assert!(measure::time_operation(pool, attend, odd, 1, 1).is_err());
}
