use super::*;

#[test]
fn a_nop_of_five_bytes_is_displaced_alone() {
    let code = [0x0f, 0x1f, 0x44, 0, 0, 0xc3];
    let span = Span::find(&code, Gva(0x1000), Gva(0x1000)).unwrap();
    assert_eq!(span.bytes(), &code[..5]);
    assert_eq!(span.interior().count(), 0);
}
