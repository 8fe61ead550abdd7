use firesteel_kernels::{Isa, KernelError};

#[test]
fn names_choose_and_unknown_names_are_refused() {
    let available = Isa::available();
    assert_eq!(available[0].name(), "scalar");
    for isa in &available {
        assert_eq!(Isa::named(Some(isa.name())), Ok(*isa));
    }
    assert_eq!(Isa::named(None), Ok(*available.last().unwrap()));
    for name in ["sse9", "", "AVX2"] {
        let error = Isa::named(Some(name)).unwrap_err();
        let KernelError::Isa { value, available } = &error else { panic!("{error}") };
        assert_eq!(value, name);
        assert!(available.starts_with("scalar"), "{error}");
    }
}

#[test]
fn the_environment_decides() {
    let expected = Isa::named(std::env::var("FIRESTEEL_ISA").ok().as_deref());
    assert_eq!(Isa::detect(), expected);
}
