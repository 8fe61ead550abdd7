use crate::session::Port;
use bytemuck::{AnyBitPattern, NoUninit, checked};
use firesteel_tensor::{Buffer, DType, Tensor, TensorView};
use half::{bf16, f16};
use ort::session::SessionInputValue;
use ort::value::{
    DynValue, Outlet, PrimitiveTensorElementType, Tensor as OrtTensor, TensorElementType, TensorRef,
};
use std::fmt::Debug;

/// The element type as ours; `None` for one that no tensor of ours can hold.
pub(crate) fn dtype_of(element: TensorElementType) -> Option<DType> {
    Some(match element {
        TensorElementType::Float64 => DType::F64,
        TensorElementType::Float32 => DType::F32,
        TensorElementType::Float16 => DType::F16,
        TensorElementType::Bfloat16 => DType::BF16,
        TensorElementType::Int64 => DType::I64,
        TensorElementType::Int32 => DType::I32,
        TensorElementType::Int16 => DType::I16,
        TensorElementType::Uint16 => DType::U16,
        TensorElementType::Int8 => DType::I8,
        TensorElementType::Uint8 => DType::U8,
        TensorElementType::Bool => DType::Bool,
        _ => return None,
    })
}

/// The port of a model's input or output.
///
/// # Errors
/// The runtime's name of the type, when it is not a tensor of a type that we have.
pub(crate) fn port_of(outlet: &Outlet) -> Result<Port, String> {
    let value_type = outlet.dtype();
    let (Some(dtype), Some(shape)) =
        (value_type.tensor_type().and_then(dtype_of), value_type.tensor_shape())
    else {
        return Err(value_type.to_string());
    };
    let shape = shape.iter().map(|dim| usize::try_from(*dim).ok()).collect();
    Ok(Port { name: outlet.name().to_owned(), dtype, shape })
}

/// `view` as an input: borrowed, or copied where its bytes are not aligned for the type.
pub(crate) fn input_value(view: TensorView<'_>) -> Result<SessionInputValue<'_>, String> {
    match view.dtype() {
        DType::F64 => number::<f64>(view),
        DType::F32 => number::<f32>(view),
        DType::F16 => number::<f16>(view),
        DType::BF16 => number::<bf16>(view),
        DType::I64 => number::<i64>(view),
        DType::I32 => number::<i32>(view),
        DType::I16 => number::<i16>(view),
        DType::U16 => number::<u16>(view),
        DType::I8 => number::<i8>(view),
        DType::U8 => number::<u8>(view),
        DType::Bool => {
            let values: &[bool] = checked::try_cast_slice(view.bytes())
                .map_err(|_| "a bool is neither 0 nor 1".to_owned())?;
            borrowed(view.shape(), values)
        }
        other => Err(format!("{other} is not supported")),
    }
}

fn number<T>(view: TensorView<'_>) -> Result<SessionInputValue<'_>, String>
where
    T: PrimitiveTensorElementType + Debug + Clone + AnyBitPattern + NoUninit,
{
    match bytemuck::try_cast_slice::<u8, T>(view.bytes()) {
        Ok(values) => borrowed(view.shape(), values),
        Err(_) => {
            let values: Vec<T> = view
                .bytes()
                .chunks_exact(size_of::<T>())
                .map(bytemuck::pod_read_unaligned)
                .collect();
            OrtTensor::from_array((view.shape().to_vec(), values))
                .map(Into::into)
                .map_err(|error| error.to_string())
        }
    }
}

fn borrowed<'v, T>(shape: &[usize], values: &'v [T]) -> Result<SessionInputValue<'v>, String>
where
    T: PrimitiveTensorElementType + Debug + Clone + 'static,
{
    TensorRef::from_array_view((shape.to_vec(), values))
        .map(Into::into)
        .map_err(|error| error.to_string())
}

/// A copy of an output.
pub(crate) fn output_tensor(value: &DynValue) -> Result<Tensor, String> {
    let value_type = value.dtype();
    let Some(dtype) = value_type.tensor_type().and_then(dtype_of) else {
        return Err(format!("{value_type} is not supported"));
    };
    match dtype {
        DType::F64 => copied::<f64>(value, dtype),
        DType::F32 => copied::<f32>(value, dtype),
        DType::F16 => copied::<f16>(value, dtype),
        DType::BF16 => copied::<bf16>(value, dtype),
        DType::I64 => copied::<i64>(value, dtype),
        DType::I32 => copied::<i32>(value, dtype),
        DType::I16 => copied::<i16>(value, dtype),
        DType::U16 => copied::<u16>(value, dtype),
        DType::I8 => copied::<i8>(value, dtype),
        DType::U8 => copied::<u8>(value, dtype),
        DType::Bool => copied::<bool>(value, dtype),
        other => Err(format!("{other} is not supported")),
    }
}

fn copied<T>(value: &DynValue, dtype: DType) -> Result<Tensor, String>
where
    T: PrimitiveTensorElementType + NoUninit,
{
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let (shape, values) = value.try_extract_tensor::<T>().map_err(|e| text(&e))?;
    let shape = shape
        .iter()
        .map(|dim| usize::try_from(*dim))
        .collect::<Result<Vec<usize>, _>>()
        .map_err(|e| text(&e))?;
    let bytes: &[u8] = bytemuck::cast_slice(values);
    Tensor::from_buffer(dtype, shape, Buffer::from(bytes)).map_err(|e| text(&e))
}
